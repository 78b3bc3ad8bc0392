"""`ChoiceTree`: proposes a tree of fixed shape from one pass of a block source."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import sampling, tree
from specjax._internal.checks import settle, typed
from specjax.contract import BlockSource, Context, MemoryT, ParamsT, ReadingT, StateT
from specjax.proposers.shapes.base import BlockShape
from specjax.proposers.shapes.choices import Choices
from specjax.types import ABSENT, Proposal


@dataclasses.dataclass(frozen=True)
class ChoiceTree(BlockShape[ParamsT, StateT, ReadingT, MemoryT]):
    """A tree of choices: (i, j) is the j-th best draft at depth 2, below the i-th best at depth 1.

    All nodes of a depth share a distribution, since the source predicts all depths in one pass,
    unless it corrects its predictions for the drafts before them.

    Siblings are the tokens of greatest logit + noise.  Under shared noise those are the best
    predictions of the target's own draw.  With separate noise for each parent, they are a sample
    without replacement (Kool et al. 2019, arXiv 1903.06059, section 3).

    Reference: Cai et al. 2024, "Medusa", arXiv 2401.10774.

    Attributes:
      source: predicts D tokens in one pass.
      choices: the tree, sorted in the order of its nodes; () is a chain of the best draft at every
        depth.
    """

    choices: Choices = ()

    def __post_init__(self) -> None:
        check_block_source(self.source)
        most, size = self.source.depth, self.source.vocab_size
        chain = tuple((0,) * n for n in range(1, most + 1))
        choices = tuple(tuple(map(int, choice)) for choice in self.choices) or chain
        object.__setattr__(
            self, "choices", tuple(sorted(choices, key=lambda choice: (len(choice), choice)))
        )
        tree.from_choices(choices)
        for choice in choices:
            settle(
                (
                    len(choice) > most,
                    f"choice {choice} lies {len(choice)} tokens ahead, and there are {most} heads: "
                    "leave it out",
                ),
                (
                    not 0 <= max(choice) < size,
                    f"choice {choice} asks for more drafts than the vocabulary of {size} tokens "
                    "has",
                ),
            )
        depth = max(map(len, self.choices))
        self.declare(
            num_nodes=len(self.choices) + 1,
            max_depth=depth,
            is_chain=depth == len(self.choices),
            taps=self.source.taps,
            waits=self.source.waits,
        )

    def propose(self, params: ParamsT, state: StateT, context: Context) -> tuple[Proposal, StateT]:
        logits, known, reading = self.source.marginals(params, state, context)
        if self.source.corrects:
            proposal = self._corrected(params, reading, known, context)
        else:
            proposal = self._independent(logits, known, context)
        return proposal, self.source.end(reading)

    def _independent(self, logits: Array, known: Array, context: Context) -> Proposal:
        """Drafts all depths at once, from the logits [B, D, V] of the source."""
        parent, depth = self._tree
        above = parent[1:]
        # Siblings are drawn together, by one top-k for each parent.  Under shared noise all parents
        # of a depth have the same children, so one top-k for each depth is enough.
        key = depth[above] if context.shared_noise else above
        _, first, group = np.unique(key, return_index=True, return_inverse=True)
        asked = above[first]
        rank = np.array([choice[-1] for choice in self.choices])

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
        return Proposal(tokens, jnp.where(known[:, None], parent, ABSENT), drawn_from)

    def _corrected(
        self, params: ParamsT, reading: ReadingT, known: Array, context: Context
    ) -> Proposal:
        """Drafts one depth after the other, each corrected for the drafts above it."""
        parent, depth = self._tree
        tokens, paths = context.pending[:, None], self._paths
        present, memory, drawn = known[:, None], None, []
        row_of, before = np.zeros(self.num_nodes, np.int32), np.zeros(1, np.int32)
        for level in range(self.max_depth):
            children = np.flatnonzero(depth == level + 1)
            asked, group = np.unique(parent[children], return_inverse=True)
            if level > 0:
                above = np.searchsorted(before, parent[asked])
                memory = jax.tree.map(lambda leaf, above=above: leaf[:, above], memory)
            made = self.source.correct(params, reading, level, tokens[:, asked], memory)
            logits, memory, goes_on = made.logits, made.memory, made.goes_on
            path = jnp.where(paths[asked] == ABSENT, ABSENT, tokens[:, paths[asked]])
            warped = context.warp(logits, path)
            noise = context.noise(jnp.asarray(asked), jnp.full(len(asked), level))
            rank = np.array([self.choices[n - 1][-1] for n in children])
            score = sampling.scores(logits, warped, noise)
            _, best = sampling.top_k(score, int(rank.max()) + 1)
            tokens = jnp.concatenate([tokens, best[:, group, rank]], axis=1)
            drafted = present[:, asked] if goes_on is None else present[:, asked] & goes_on
            present = jnp.concatenate([present, drafted[:, group]], axis=1)
            row_of[asked] = sum(x.shape[1] for x in drawn) + np.arange(len(asked))
            drawn.append(warped)
            before = asked
        logits = jnp.concatenate(drawn, axis=1)[:, row_of] if context.wants_logits else None
        return Proposal(tokens, jnp.where(present, parent, ABSENT), logits)

    @property
    def _tree(self) -> tuple[np.ndarray, np.ndarray]:
        """The parent and the depth of each node."""
        return tree.from_choices(self.choices), np.array([0, *map(len, self.choices)])

    @property
    def _paths(self) -> np.ndarray:
        """[N, D] the nodes from below the root to each node, padded with ABSENT."""
        index = {choice: node for node, choice in enumerate(self.choices, start=1)}
        ways = [()] + [[index[c[: n + 1]] for n in range(len(c))] for c in self.choices]
        return np.array([[*way, *[ABSENT] * (self.max_depth - len(way))] for way in ways])


def check_block_source(source: object) -> None:
    """Raises ValueError unless `source` is a block source."""
    typed("a block source, such as MedusaSource(heads)", BlockSource, source=source)
