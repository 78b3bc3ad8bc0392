"""`Calibrated`: a proposer of trees that learns how likely its drafts are accepted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax import tree
from specjax.contract import Context, Loaded, Proposer, Wrapper
from specjax.proposers.combine.judging import right_nodes
from specjax.proposers.combine.survival import TRUSTED, Survival
from specjax.types import ABSENT, Block, Proposal

_SIBLING = -60.0
"""The log-chance of a sibling in a row whose tree is to be a chain."""

_InnerT = TypeVar("_InnerT")
_StateT = TypeVar("_StateT")


@struct.dataclass
class CalibratedState(Generic[_StateT]):
    """The state of a `Calibrated` proposer."""

    inner: _StateT
    survival: Survival
    # Of the last proposal, whose drafts teach once the token after the accepted ones is known.
    tokens: Array  # [B, N]
    parent: Array  # [B, N]
    given: Array  # [B, N]
    text: Array  # [B, D + 1] tokens committed since, the root first
    count: Array  # [B] how many there are


@dataclasses.dataclass(frozen=True)
class Calibrated(Wrapper[_InnerT, Any, _InnerT], Generic[_InnerT, _StateT]):
    """Chooses the nodes of each tree by chances that it learns from the drafts of the same text.

    A source's probability of a draft is not the probability that it is accepted: a head may be too
    sure of itself, and under `rejection` a sampled draft is accepted far more often than its
    probability says.  The drafts whose parents were accepted correct the estimate (`Survival`).  So
    trees grow deep where first drafts are mostly right, and wide where one of several is.

    Only the text of the row and its earlier drafts decide which nodes are drafted, so `match` and
    `rejection` stay exact, and a row does not depend on the rest of its batch.  All that is learned
    is in the state: nothing is compiled again, and no step waits for the host.

    Attributes:
      inner: a proposer of trees that estimates chances: `DynamicTree`, `BestFirst`, or a
        `CostAware` of one of them, which then has the learned chances too.

    Example:
      >>> tree = specjax.load_drafter("org/head", target, specjax.DynamicTree, num_nodes=16)
      >>> specjax.generate(target, prompt, drafter=specjax.calibrated(tree))
    """

    inner: Proposer[_InnerT, Any]

    def __post_init__(self) -> None:
        inner = self.inner
        if not (inner.estimates or getattr(getattr(inner, "inner", None), "estimates", False)):
            raise ValueError(
                f"a {type(inner).__name__} does not estimate the chances of its drafts: pass a "
                "BestFirst or a DynamicTree"
            )
        if inner.shares_cache:
            raise ValueError(
                "a proposer that drafts in the target's cache has no state of its own, and so it "
                "cannot learn: use it without Calibrated"
            )
        self.declare_like()

    def init(self, params: _InnerT, prompt: Block, capacity: int) -> CalibratedState[_StateT]:
        rows = len(prompt.count)
        none = jnp.full((rows, self.num_nodes), ABSENT, jnp.int32)
        prior = jnp.broadcast_to(jnp.array(TRUSTED, jnp.float32), (rows, len(TRUSTED)))
        return CalibratedState(
            self.inner.init(params, prompt, capacity),
            Survival.start(prior),
            jnp.zeros_like(none),
            none,
            jnp.zeros(none.shape, jnp.float32),
            jnp.zeros((rows, self.max_depth + 1), jnp.int32),
            jnp.zeros(rows, jnp.int32),
        )

    def bind(self, target: Loaded, draft: Loaded | None) -> _InnerT:
        return self.inner.bind(target, draft)

    def propose(
        self, params: _InnerT, state: CalibratedState[_StateT], context: Context
    ) -> tuple[Proposal, CalibratedState[_StateT]]:
        survival = state.survival.after(state.given, *_outcomes(state, context.pending))
        context = dataclasses.replace(context, survival=_chances(survival, context.chains))
        proposal, inner = self.inner.propose(params, state.inner, context)
        assert proposal.given is not None  # `estimates`
        parent = proposal.parent
        if context.num_drafts is not None:
            # The decoder drops deeper drafts: they are not judged.
            deep = jax.vmap(tree.depth)(parent) > context.num_drafts[:, None]
            parent = jnp.where(deep, ABSENT, parent)
        after = CalibratedState(
            inner, survival, proposal.tokens, parent, proposal.given, state.text,
            jnp.zeros_like(state.count),
        )  # fmt: skip
        return proposal, after

    def observe(
        self, params: _InnerT, state: CalibratedState[_StateT], block: Block
    ) -> CalibratedState[_StateT]:
        width = min(state.text.shape[1], block.tokens.shape[1])
        text = state.text.at[:, :width].set(block.tokens[:, :width])
        inner = self.inner.observe(params, state.inner, block)
        return dataclasses.replace(state, inner=inner, text=text, count=block.count)

    def read(
        self, params: _InnerT, state: CalibratedState[_StateT], block: Block
    ) -> CalibratedState[_StateT]:
        return dataclasses.replace(state, inner=self.inner.read(params, state.inner, block))

    def truncate(
        self, state: CalibratedState[_StateT], count: Array, last: Array | None
    ) -> CalibratedState[_StateT] | None:
        inner = self.inner.truncate(state.inner, count, last)
        if inner is None:
            return None
        # What was learned from another text stays with it.
        prior = jnp.broadcast_to(jnp.array(TRUSTED, jnp.float32), state.survival.numbers.shape)
        fresh = dataclasses.replace(self._without(state), survival=Survival.start(prior))
        return dataclasses.replace(fresh, inner=inner)

    def catch_up(
        self, params: _InnerT, state: CalibratedState[_StateT]
    ) -> CalibratedState[_StateT] | None:
        inner = self.inner.catch_up(params, state.inner)
        return None if inner is None else dataclasses.replace(self._without(state), inner=inner)

    def adapt(self, state: CalibratedState[_StateT], adapter: Array) -> CalibratedState[_StateT]:
        return dataclasses.replace(state, inner=self.inner.adapt(state.inner, adapter))

    def rest(self, state: CalibratedState[_StateT]) -> CalibratedState[_StateT]:
        return dataclasses.replace(self._without(state), inner=self.inner.rest(state.inner))

    def resume(
        self,
        params: _InnerT,
        state: CalibratedState[_StateT],
        text: Array,
        length: Array,
        wanted: Array,
    ) -> CalibratedState[_StateT]:
        inner = self.inner.resume(params, state.inner, text, length, wanted)
        return dataclasses.replace(state, inner=inner)

    def _without(self, state: CalibratedState[_StateT]) -> CalibratedState[_StateT]:
        """Returns the state without the last proposal, from which nothing will be learned."""
        return dataclasses.replace(state, parent=jnp.full_like(state.parent, ABSENT))


def _chances(survival: Survival, chains: Array | None) -> Callable[[Array], Array]:
    """Returns the chances of children; of rows with chains the first child has all of it."""

    def chance(given: Array) -> Array:
        learned = survival.chance(given)
        if chains is None:
            return learned
        straight = jnp.where(jnp.arange(given.shape[-1]) == 0, 0.0, _SIBLING)
        return jnp.where(chains[:, None, None], straight, learned)

    return chance


def _outcomes(state: CalibratedState[_StateT], pending: Array) -> tuple[Array, Array, Array]:
    """Returns [B, N] bool each: drafts that are no first children, were judged, and were right.

    A draft is judged if all drafts above it were right.  It is right if it is the token that the
    text has at its place, also if the target never read it.
    """
    parent = state.parent
    right, depth = right_nodes(state.tokens, parent, state.text, state.count, pending)
    present = parent != ABSENT
    above = jnp.take_along_axis(right, jnp.maximum(parent, 0), axis=1)
    judged = present & above & (depth <= state.count[:, None])
    number = jnp.arange(parent.shape[1])
    same = (parent[..., None] == parent[:, None]) & (number < number[:, None])
    return present & same.any(2), judged, judged & right
