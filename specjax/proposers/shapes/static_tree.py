"""`StaticTree`: proposes a tree of fixed shape, from any source."""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling, tree
from specjax._internal.checks import counts, listed, settle
from specjax.contract import Context, ParamsT, ReadingT, StateT
from specjax.proposers.shapes.base import Shape
from specjax.types import Proposal


@dataclasses.dataclass(frozen=True)
class StaticTree(Shape[ParamsT, StateT, ReadingT]):
    """A tree in which every node of level l has `branching[l]` children.

    For example (3, 2, 1) makes levels of 3, 6 and 6 nodes.

    Siblings are the tokens of greatest logit + noise.  Under shared noise those are the best
    predictions of the target's own draw.  With separate noise for each node, they are a sample
    without replacement (Gumbel-top-k).  Siblings beyond the tokens that can be drawn, as at
    temperature 0, are the next best ones, and can be accepted too.

    The source reads a level in one pass.  That pass reads the levels above again, since its tokens
    attend only to committed tokens and to those of the same pass.  So a proposal costs one pass for
    each level except the last, which is never read.

    Reference: Kool et al. 2019, arXiv 1903.06059, section 3 (Gumbel-top-k); Jeon et al. 2024,
    arXiv 2402.14160.

    Example:
      >>> drafter = specjax.make_drafter(target, draft, StaticTree, branching=(3, 2, 1))
    """

    branching: tuple[int, ...] = (3, 2, 1)
    is_chain = False

    def __post_init__(self) -> None:
        super().__post_init__()
        cure = "the children per node of each level, as in (3, 2, 1)"
        size = self.source.vocab_size
        levels = listed("branching", self.branching, cure)
        for level in levels:
            counts(branching=level)
        object.__setattr__(self, "branching", tuple(levels))  # a list would not be hashable
        settle(
            (
                not levels or min(levels) < 1,
                f"branching={self.branching}; every level needs at least 1 child per node, as in "
                "(3, 2, 1)",
            ),
            (
                max(levels, default=0) > size,
                f"branching={self.branching}; siblings are distinct tokens, and the vocabulary has "
                f"only {size} tokens",
            ),
        )
        nodes = sum(self._widths)
        self.arrange(nodes, len(self.branching), nodes)

    @property
    def parent(self) -> np.ndarray:
        """[N] the parent of each node, level by level, with siblings next to each other."""
        starts = np.cumsum([0, *self._widths])
        levels = [np.arange(first, end) for first, end in itertools.pairwise(starts)]
        below = [
            np.repeat(nodes, children)
            for nodes, children in zip(levels, self.branching, strict=False)
        ]
        return np.concatenate([tree.chain(1), *below]).astype(np.int32)

    @property
    def _widths(self) -> list[int]:
        return [math.prod(self.branching[:level]) for level in range(len(self.branching) + 1)]

    def propose(self, params: ParamsT, state: StateT, context: Context) -> tuple[Proposal, StateT]:
        rows, parent = len(context.pending), jnp.array(self.parent)
        depth, mask = tree.depth(parent), tree.ancestor_mask(parent)
        state, reading, logits = self.source.begin(params, state, context)

        tokens, logits, drawn_from = context.pending[:, None], logits[:, None], []
        for level, (width, children) in enumerate(zip(self._widths, self.branching, strict=False)):
            nodes = jnp.arange(tokens.shape[1] - width, tokens.shape[1])
            if level > 0:
                # All nodes so far but the root, which the source has already read.
                at, seen = jnp.broadcast_to(nodes - 1, (rows, width)), slice(1, tokens.shape[1])
                reading, logits = self.source.read_tree(
                    params, reading, tokens[:, seen], at, depth[seen] - 1, mask[None, seen, seen]
                )
            path = jax.vmap(tree.path_tokens, (0, None, None))(
                tokens, parent[: tokens.shape[1]], level
            )
            warped = context.warp(logits, path[:, nodes])
            noise = context.noise(nodes, jnp.full(width, level))
            _, best = sampling.top_k(sampling.scores(logits, warped, noise), children)
            tokens = jnp.concatenate([tokens, best.reshape(rows, -1)], axis=1)
            drawn_from.append(warped)
        parents = jnp.broadcast_to(parent, tokens.shape)
        known = self.source.known(params, reading, tokens)
        if known is not None:
            parents = jax.vmap(tree.prune)(parents, known)
        all_logits = None
        if context.wants_logits:
            # Nodes of the last level have no children, so their rows of logits are never read.
            drawn_from.append(jnp.zeros((rows, self._widths[-1], logits.shape[-1]), jnp.float32))
            all_logits = jnp.concatenate(drawn_from, axis=1)
        proposal = Proposal(tokens, parents, all_logits)
        return proposal, self.source.end(params, state, reading, proposal)
