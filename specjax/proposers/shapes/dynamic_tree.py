"""`DynamicTree`: grows a tree along the most probable drafts of any source."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from specjax import tree
from specjax._internal.checks import counts, within
from specjax._internal.control_flow import apply_if
from specjax.contract import Context, ParamsT, ReadingT, StateT
from specjax.proposers.shapes.base import Shape
from specjax.proposers.shapes.offered import offer
from specjax.types import ABSENT, Proposal


@dataclasses.dataclass(frozen=True)
class DynamicTree(Shape[ParamsT, StateT, ReadingT]):
    """Expands the `width` most probable nodes of each level by `width` children each.

    A node's value is the product of the source's probabilities on its path, and the `num_nodes`
    nodes of greatest value are proposed.  Parents are traced, so every row and step has a tree of
    its own, in one compiled program.

    The definition of a value depends on the rule's noise, as in `BestFirst`:

    - Under shared noise, the probabilities are those after the noise is added, since proposer and
      rule both have it.
    - Under independent draws every parent's children are samples without replacement, drawn with
      noise of their own.  The r-th child counts with the r-th greatest probability after its
      parent.  So a node's presence may depend on the drafts above it, on its better siblings and on
      other branches, but not on its own token: `rejection` stays exact.

    With `Context.depth` levels below it are left out, with their passes, and of each row those
    below its `Context.num_drafts`.

    Reference: Li et al. 2024 (EAGLE-2), arXiv 2406.16858, section 4: expansion and reranking; for
    drafts without replacement, Jeon et al. 2024, arXiv 2402.14160.

    Example:
      >>> drafter = specjax.make_drafter(target, draft, DynamicTree, depth=4, num_nodes=16)
    """

    depth: int = 4
    width: int = 4
    num_nodes: int = 16  # proposed nodes, the root included
    is_chain = False
    estimates = True

    def __post_init__(self) -> None:
        super().__post_init__()
        counts(depth=self.depth, width=self.width, num_nodes=self.num_nodes)
        within("depth", self.depth, 1)
        size = self.source.vocab_size
        within("width", self.width, 1, size, ", the size of the vocabulary")
        candidates = 1 + self.width + (self.depth - 1) * self.width**2
        made = (
            f", since depth={self.depth} and width={self.width} make {candidates} candidates, the "
            "root included"
        )
        within("num_nodes", self.num_nodes, 2, candidates, made)
        # All expanded nodes are staged, even those that are not proposed in the end.
        self.arrange(
            self.num_nodes, self.depth, max(1 + (self.depth - 1) * self.width, self.num_nodes)
        )

    def propose(self, params: ParamsT, state: StateT, context: Context) -> tuple[Proposal, StateT]:
        rows, width = len(context.pending), self.width
        state, reading, logits = self.source.begin(params, state, context)
        logits, root = logits[:, None], jnp.zeros((rows, 1), jnp.int32)

        # Candidates of all levels.  `parent` indexes into them; `value` is a log-probability.
        tokens, parent = context.pending[:, None], root + ABSENT
        value = given = jnp.zeros((rows, 1), jnp.float32)
        # The expanded candidates.  `above` is their parent, as an index into `expanded`; `frontier`
        # are those expanded last.
        expanded, above, frontier, new = root, root + ABSENT, root, value
        drawn = []
        for level in range(self.depth):
            if level > 0:
                _, best = jax.lax.top_k(new, width)
                above = jnp.concatenate(
                    [above, expanded.shape[1] - frontier.shape[1] + best // width], axis=1
                )
                frontier = tokens.shape[1] - new.shape[1] + best
                expanded = jnp.concatenate([expanded, frontier], axis=1)
                # All expanded nodes but the root, which the source has already read.
                last = jnp.broadcast_to(
                    jnp.arange((level - 1) * width, level * width), (rows, width)
                )
                depth = jnp.repeat(jnp.arange(level), width)
                mask = jax.vmap(tree.ancestor_mask)(above)[:, 1:, 1:]
                nodes = _take(tokens, expanded[:, 1:])
                wanted = None if context.depth is None else context.depth > level
                reading, logits = self._read(params, reading, (nodes, last, depth, mask), wanted)
            paths = jax.vmap(tree.path_tokens, (0, 0, None))(tokens, parent, level)
            warped = context.warp(logits, jnp.take_along_axis(paths, frontier[..., None], axis=1))
            drawn.append(warped)
            # Every parent has the noise of its depth, or its own.
            parents = 1 if context.shared_noise else frontier.shape[1]
            node = jnp.arange(expanded.shape[1] - frontier.shape[1], expanded.shape[1])[:parents]
            noise = context.noise(node, jnp.full(parents, level))
            found, chance, best = offer(logits, warped, noise, width, context)
            if context.depth is not None:
                chance = jnp.where(_goes_deeper(context, level), chance, -jnp.inf)
            new = (_take(value, frontier)[..., None] + chance).reshape(rows, -1)
            tokens = jnp.concatenate([tokens, best.reshape(rows, -1)], axis=1)
            parent = jnp.concatenate([parent, jnp.repeat(frontier, width, axis=1)], axis=1)
            value = jnp.concatenate([value, new], axis=1)
            given = jnp.concatenate([given, found.reshape(rows, -1)], axis=1)

        # A parent's value is at least that of its child, and it comes first (top_k breaks ties by
        # index), so the best candidates form a tree.  Those of value -inf are in levels left out.
        _, chosen = jax.lax.top_k(value, self.num_nodes)
        chosen = jnp.sort(chosen, axis=1)
        parents = jax.vmap(jnp.searchsorted)(chosen, _take(parent, chosen)).astype(jnp.int32)
        parents = jnp.where(_take(value, chosen) > -jnp.inf, parents, ABSENT)
        nodes, parent = _take(tokens, chosen), parents.at[:, 0].set(ABSENT)
        known = self.source.known(params, reading, nodes)
        if known is not None:
            parent = jax.vmap(tree.prune)(parent, known)
        made = None
        if context.wants_logits:
            # The row of each expanded candidate; the others have no children, and get any row.
            row = jnp.zeros(tokens.shape, jnp.int32)
            row = jax.vmap(lambda row, at: row.at[at].set(jnp.arange(len(at))))(row, expanded)
            every = jnp.concatenate(drawn, axis=1)
            made = jax.vmap(lambda x, at: x[at])(every, _take(row, chosen))
        proposal = Proposal(
            nodes, parent, made, chance=jnp.exp(_take(value, chosen)), given=_take(given, chosen)
        )
        return proposal, self.source.end(params, state, reading, proposal)

    def _read(
        self,
        params: ParamsT,
        reading: ReadingT,
        level: tuple[Array, Array, Array, Array],
        wanted: Array | None,
    ) -> tuple[ReadingT, Array]:
        """Returns `Source.read_tree` of a level, without the pass where `wanted` [] is False."""

        def read(known: ReadingT) -> tuple[ReadingT, Array]:
            return self.source.read_tree(params, known, *level)

        if wanted is None:
            return read(reading)

        # A leaf of the reading may grow with each level.  The others are updated in place.
        def same(old: Array, new: Array | jax.ShapeDtypeStruct) -> bool:
            return old.shape == new.shape and old.dtype == new.dtype

        shapes, row = jax.eval_shape(read, reading)
        start = jax.tree.map(
            lambda old, new: old if same(old, new) else jnp.zeros(new.shape, new.dtype),
            reading,
            shapes,
        )

        def turn(carry: tuple[ReadingT, Array]) -> tuple[ReadingT, Array]:
            known = jax.tree.map(lambda new, old: new if same(old, new) else old, carry[0], reading)
            return read(known)

        return apply_if(wanted, turn, (start, jnp.zeros(row.shape, row.dtype)))


def _goes_deeper(context: Context, level: int) -> Array:
    """Returns [B or 1, 1, 1] bool: whether a row has drafts at this level, counted from 0."""
    deep = jnp.ones(1, bool)
    for most in (context.depth, context.num_drafts):
        deep = deep if most is None else deep & (most > level)
    return deep[:, None, None]


def _take(x: Array, index: Array) -> Array:
    return jnp.take_along_axis(x, index, axis=1)
