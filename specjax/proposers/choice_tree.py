"""`ChoiceTree`: a tree of fixed shape from one pass of a block source."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from specjax import sampling, tree
from specjax.contract import Arrays, BlockSource, Context, Loaded, Proposer
from specjax.proposers.choices import Choices
from specjax.types import ABSENT, Block, Proposal


@dataclasses.dataclass(frozen=True)
class ChoiceTree(Proposer):
    """The choice (i, j) is the j-th best draft at depth 2, below the i-th best draft at depth 1.

    All nodes of a depth share a distribution, since the source predicts all depths in one pass and
    does not condition on its own drafts.

    Siblings are the tokens of greatest logit + noise.  Under shared noise those are the best
    predictions of the target's own draw.  With separate noise for each parent, they are a sample
    without replacement (Kool et al. 2019, arXiv 1903.06059, section 3).

    Reference: Cai et al. 2024, "Medusa", arXiv 2401.10774.

    Attributes:
      source: predicts D tokens in one pass.
      choices: the tree, sorted in the order of its nodes; () is a chain of the best draft at every
        depth.
    """

    source: BlockSource
    choices: Choices = ()

    def __post_init__(self) -> None:
        if not isinstance(self.source, BlockSource):
            raise ValueError(
                f"source is a {type(self.source).__name__}; pass a block source, such as "
                "MedusaSource(heads)"
            )
        most, size = self.source.depth, self.source.vocab_size
        chain = tuple((0,) * n for n in range(1, most + 1))
        choices = tuple(tuple(map(int, choice)) for choice in self.choices) or chain
        object.__setattr__(
            self, "choices", tuple(sorted(choices, key=lambda choice: (len(choice), choice)))
        )
        tree.from_choices(choices)
        for choice in choices:
            if len(choice) > most:
                raise ValueError(
                    f"choice {choice} lies {len(choice)} tokens ahead, and there are {most} heads: "
                    "leave it out"
                )
            if not 0 <= max(choice) < size:
                raise ValueError(
                    f"choice {choice} asks for more drafts than the vocabulary of {size} tokens has"
                )
        depth = max(map(len, self.choices))
        self.declare(
            num_nodes=len(self.choices) + 1,
            max_depth=depth,
            is_chain=depth == len(self.choices),
            taps=self.source.taps,
        )

    def bind(self, target: Loaded, draft: Loaded | None) -> Arrays:
        return self.source.bind(target, draft)

    def init(self, params: Arrays, prompt: Block, capacity: int) -> Arrays:
        return self.source.init(params, prompt, capacity)

    def observe(self, params: Arrays, state: Arrays, block: Block) -> Arrays:
        return self.source.observe(params, state, block)

    def propose(self, params: Arrays, state: Arrays, context: Context) -> tuple[Proposal, Arrays]:
        parent = tree.from_choices(self.choices)
        depth = np.array([0, *map(len, self.choices)])
        above = parent[1:]
        # Siblings are drawn together, by one top-k for each parent.  Under shared noise all parents
        # of a depth have the same children, so one top-k for each depth is enough.
        key = depth[above] if context.shared_noise else above
        _, first, group = np.unique(key, return_index=True, return_inverse=True)
        asked = above[first]
        rank = np.array([choice[-1] for choice in self.choices])

        logits, known, state = self.source.marginals(params, state, context)
        logits = logits[:, : self.max_depth]
        warped = context.warp(logits)
        noise = context.noise(jnp.asarray(asked), jnp.asarray(depth[asked]))
        score = sampling.scores(logits[:, depth[asked]], warped[:, depth[asked]], noise)
        _, best = sampling.top_k(score, int(rank.max()) + 1)
        tokens = jnp.concatenate([context.pending[:, None], best[:, group, rank]], axis=1)
        # Nodes of the last level have no children, so their rows of logits are never read.
        drawn_from = (
            warped[:, np.minimum(depth, self.max_depth - 1)] if context.wants_logits else None
        )
        return Proposal(tokens, jnp.where(known[:, None], parent, ABSENT), drawn_from), state
