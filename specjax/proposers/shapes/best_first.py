"""`BestFirst`: proposes the tree of the best paths through the predictions of one pass."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax._internal.checks import within
from specjax.contract import Context, MemoryT, ParamsT, ReadingT, StateT
from specjax.proposers.shapes.base import BlockShape
from specjax.proposers.shapes.choice_tree import check_block_source
from specjax.proposers.shapes.offered import offer
from specjax.types import ABSENT, Proposal


@dataclasses.dataclass(frozen=True)
class BestFirst(BlockShape[ParamsT, StateT, ReadingT, MemoryT]):
    """Proposes the `num_nodes` paths of greatest value, a product of probabilities.

    Parents are traced: every row and step has a tree of its own, in one compiled program.

    Siblings are the tokens of greatest logit + noise, at temperature 0 the most probable tokens.
    The definition of a value depends on the rule's noise:

    - Under shared noise all nodes of a depth share the noise of their position, and a node's value
      has the probabilities of the drafts on its path after that noise is added.
    - Under independent draws the drafts are samples without replacement.  A node that is the r-th
      child of its parent then counts with the r-th greatest probability after the parent, not with
      that of its own token.  So whether a node is present depends on the text and on drafts of
      other parents, but not on its own token, nor on its siblings': `rejection` stays exact.

    If the source does not correct, one noise serves all parents of a depth: a rule judges the
    children of one parent for each depth, and the tree is then a function of only the text.  If it
    corrects, each parent has its own noise, since its tree depends on what was drawn elsewhere.

    Reference: the tree of DDTree, arXiv 2604.12989, and of JetSpec, arXiv 2606.18394.

    Attributes:
      source: predicts D tokens in one pass.
      num_nodes: N, the root included.
      width: the most children of a node.  If the source corrects, this is also the most nodes of
        a depth that get children.

    Example:
      >>> drafter = specjax.load_drafter("org/head", target, BestFirst, num_nodes=32, width=8)
    """

    num_nodes: int = 16
    width: int = 4
    is_chain = False

    def __post_init__(self) -> None:
        check_block_source(self.source)
        size = self.source.vocab_size
        within("width", self.width, 1, size, ", the size of the vocabulary")
        within("num_nodes", self.num_nodes, 2, note=", since it counts the root too")
        depth = min(self.source.depth, self.num_nodes - 1)
        source = self.source
        self.declare(max_depth=depth, taps=source.taps, waits=source.waits, estimates=True)
        most = 1 + sum(kept for _, kept in self._levels)
        note = (
            f": {self.source.depth} drafts a block and width={self.width} make {most} candidates, "
            "the root included, and a greater width makes more"
        )
        within("num_nodes", self.num_nodes, 2, most, note)

    @property
    def _levels(self) -> list[tuple[int, int]]:
        """Returns for each depth how many nodes get children, and how many children are kept.

        A node's value is at most its parent's, so only the best N - 1 of a depth can be proposed.
        """
        most = self.num_nodes - 1
        limit = min(most, self.width) if self.source.corrects else most
        levels, expanded = [], 1
        for _ in range(self.max_depth):
            kept = min(most, expanded * self.width)
            levels.append((expanded, kept))
            expanded = min(kept, limit)
        return levels

    def propose(self, params: ParamsT, state: StateT, context: Context) -> tuple[Proposal, StateT]:
        source, rows, width = self.source, len(context.pending), self.width
        marginals, known, reading = source.marginals(params, state, context)
        zero = jnp.zeros((rows, 1), jnp.int32)
        # Candidates of all depths.
        tokens, parent = context.pending[:, None], zero + ABSENT
        value = given = jnp.zeros((rows, 1), jnp.float32)
        # Those that get children: indices of candidates, their values, and their paths.
        frontier, worth = zero, value
        paths = jnp.zeros((rows, 1, 0), jnp.int32)
        memory, drawn, numbered = None, [], 0
        for depth, (expanded, kept) in enumerate(self._levels):
            if source.corrects:
                previous = _take(tokens, frontier)
                made = source.correct(params, reading, depth, previous, memory)
                logits, memory, goes_on = made.logits, made.memory, made.goes_on
                padded = jnp.pad(
                    paths, ((0, 0), (0, 0), (0, self.max_depth - depth)), constant_values=ABSENT
                )
                warped = context.warp(logits, padded)
            else:
                logits, goes_on = marginals[:, depth, None], None
                warped = context.warp(logits)
            drawn.append(warped)
            # A parent has the noise of its depth, or its own.
            parents = 1 if context.shared_noise else logits.shape[1]
            node = jnp.arange(numbered, numbered + parents)
            numbered += parents
            noise = context.noise(node, jnp.full(parents, depth))
            found, chance, best = offer(logits, warped, noise, width, context)
            if goes_on is not None:
                chance = jnp.where(goes_on[..., None], chance, -jnp.inf)
            new = (worth[..., None] + chance).reshape(rows, -1)
            best, found = (
                jnp.broadcast_to(x, (rows, expanded, width)).reshape(rows, -1)
                for x in (best, found)
            )

            worth, at = jax.lax.top_k(new, kept)
            up = at // width
            first = tokens.shape[1]
            tokens = jnp.concatenate([tokens, _take(best, at)], axis=1)
            parent = jnp.concatenate([parent, _take(frontier, up)], axis=1)
            value = jnp.concatenate([value, worth], axis=1)
            given = jnp.concatenate([given, _take(found, at)], axis=1)
            if depth + 1 == self.max_depth:
                continue
            count = self._levels[depth + 1][0]
            frontier = jnp.broadcast_to(jnp.arange(first, first + count), (rows, count))
            worth, up, at = worth[:, :count], up[:, :count], at[:, :count]
            memory = jax.tree.map(lambda leaf, up=up: jax.vmap(_rows)(leaf, up), memory)
            paths = jnp.concatenate(
                [jax.vmap(_rows)(paths, up), _take(best, at)[..., None]], axis=2
            )

        # A parent's value is at least that of its child, and it comes first (top_k breaks ties by
        # index), so the best candidates form a tree.  Those of value -inf stand for no token.
        _, chosen = jax.lax.top_k(value, self.num_nodes)
        chosen = jnp.sort(chosen, axis=1)
        parents = jax.vmap(jnp.searchsorted)(chosen, _take(parent, chosen)).astype(jnp.int32)
        present = known[:, None] & (_take(value, chosen) > -jnp.inf)
        parents = jnp.where(present, parents, ABSENT).at[:, 0].set(ABSENT)
        logits = self._drawn_from(drawn, chosen) if context.wants_logits else None
        chance = jnp.exp(_take(value, chosen))
        given = _take(given, chosen)
        proposal = Proposal(_take(tokens, chosen), parents, logits, chance=chance, given=given)
        return proposal, source.end(reading)

    def _drawn_from(self, drawn: list[Array], chosen: Array) -> Array:
        """Returns [B, N, V] the logits from which the children of each chosen candidate were drawn.

        Candidates without children get any row.
        """
        first, at = 0, [np.zeros(1, np.int32)]
        for warped, (_, kept), (below, _) in zip(
            drawn, self._levels, [*self._levels[1:], (1, 0)], strict=True
        ):
            first += warped.shape[1]
            index = np.minimum(np.arange(kept), below - 1) if self.source.corrects else 0
            at.append(np.broadcast_to(first + index, (kept,)))
        every = jnp.concatenate(drawn, axis=1)
        row_of = np.minimum(np.concatenate(at), every.shape[1] - 1)
        return jax.vmap(_rows)(every, jnp.asarray(row_of)[chosen])


def _take(x: Array, index: Array) -> Array:
    return jnp.take_along_axis(x, index, axis=1)


def _rows(x: Array, index: Array) -> Array:
    return x[index]
