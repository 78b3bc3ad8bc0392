"""The programs of a step on two meshes, and the state between two steps."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.sharding import Mesh

from specjax._internal.jit_cache import programs, structure_of
from specjax.overlap.outcomes import Ahead, Fan, Foresight, draft, look_ahead, settle
from specjax.overlap.sides import DecoderLike
from specjax.parallel import constrain_like, shard_state
from specjax.types import Arrays, DecodeState, Params, Proposal, Stats, Verdict

RANKS = 4
"""The most guesses of the token after a node, in tokens."""

Layout = Any
"""The result of `sharding.layout`."""


@struct.dataclass
class Drafting:
    """The draft's half between two steps; the proposal is for the next verification."""

    state: DecodeState
    proposal: Proposal
    foresight: Foresight


@struct.dataclass
class OverlapState:
    """Both halves of a decode state.  In a process without devices of a half it is None."""

    target: DecodeState | None
    draft: Drafting | None

    @property
    def seen(self) -> DecodeState:
        """Returns the half that this process has; both have the same tokens and figures."""
        if self.target is not None:
            return self.target
        assert self.draft is not None
        return self.draft.state

    @property
    def tokens(self) -> Array:
        return self.seen.tokens

    @property
    def length(self) -> Array:
        return self.seen.length

    @property
    def done(self) -> Array:
        return self.seen.done

    @property
    def eos(self) -> Array:
        return self.seen.eos

    @property
    def stats(self) -> Stats:
        return self.seen.stats

    @property
    def logprobs(self) -> Arrays:
        return self.seen.logprobs


def proposal_shapes(decoder: DecoderLike, rows: int) -> Proposal:
    """Returns the shapes of the proposals of the draft's half."""
    proposer, rule = decoder.proposer, decoder.rule
    nodes = jax.ShapeDtypeStruct((rows, proposer.num_nodes), jnp.int32)
    logits: Any = None
    if rule.wants_logits and not proposer.point_mass:
        shape = (rows, proposer.num_nodes, decoder.target.vocab_size)
        logits = jax.ShapeDtypeStruct(shape, jnp.float32)
    point_mass = proposer.point_mass and not rule.shared_noise
    return Proposal(nodes, nodes, logits, point_mass)  # type: ignore[arg-type]


def _kind(decoder_state: Any) -> tuple[object, ...]:
    return (
        decoder_state.tokens.shape,
        decoder_state.eos.shape,
        structure_of(decoder_state.processors),
    )


@programs(static=3, shape=lambda params, state: _kind(state), donate=(4,))
def begin(
    decoder: DecoderLike,
    at: tuple[bool, Mesh],
    layout: Layout,
    params: Params,
    state: DecodeState,
) -> Drafting:
    """Returns the first proposal; `at` holds whether guesses know the noise, and the mesh."""
    coupled, mesh = at
    proposal, state = draft(decoder, params, state)
    rows, nodes = proposal.parent.shape
    blind = (state.sampling.temperature > 0) & (not coupled)
    foresight = Foresight.create(rows, nodes, RANKS, blind)
    proposal, foresight = shard_state((proposal, foresight), mesh, False)
    return Drafting(constrain_like(state, layout), proposal, foresight)


@programs(static=2, shape=lambda params, state, proposal: _kind(state), donate=(3,))
def verify(
    decoder: DecoderLike, layout: Layout, params: Params, state: DecodeState, proposal: Proposal
) -> tuple[DecodeState, Verdict]:
    """Runs the target's half of a step; it does nothing if all rows are done."""

    def turn(carry: Any) -> Any:
        _, state, _ = carry
        with jax.named_scope("verify"):
            verification = decoder.verify(params, state, proposal)
        with jax.named_scope("commit"):
            state, info = decoder.commit(params, state, proposal, verification)
        return jnp.zeros((), bool), constrain_like(state, layout), info.verdict

    zero = jnp.zeros_like(state.length)
    # A loop of at most one iteration, because XLA copies the cache that a branch returns.
    carry: Any = (~state.done.all(), state, Verdict(zero, zero))
    _, state, verdict = jax.lax.while_loop(lambda carry: carry[0], turn, carry)
    return constrain_like(state, layout), verdict


@programs(static=2, shape=lambda params, drafting: _kind(drafting.state))
def prepare(
    decoder: DecoderLike, at: tuple[Fan, Mesh, bool], params: Params, drafting: Drafting
) -> Ahead:
    fan, mesh, split = at
    with jax.named_scope("look_ahead"):
        ahead = look_ahead(
            decoder, fan, params, drafting.state, drafting.proposal, drafting.foresight
        )
    return shard_state(ahead, mesh, split)


@programs(
    static=2, shape=lambda params, drafting, verdict, ahead: _kind(drafting.state), donate=(3,)
)
def conclude(
    decoder: DecoderLike,
    layout: Layout,
    params: Params,
    drafting: Drafting,
    verdict: Verdict,
    ahead: Ahead | None,
) -> Drafting:
    with jax.named_scope("settle"):
        made = settle(
            decoder,
            params,
            drafting.state,
            drafting.proposal,
            drafting.foresight,
            verdict,
            ahead,
        )
    return constrain_like(Drafting(*made), layout)


def stopped(state: OverlapState, stop: Array) -> OverlapState:
    """Returns `state` whose rows `stop` [B] are done."""
    target, draft = state.target, state.draft
    if target is not None:
        target = dataclasses.replace(target, done=target.done | stop)
    if draft is not None:
        inner = dataclasses.replace(draft.state, done=draft.state.done | stop)
        draft = dataclasses.replace(draft, state=inner)
    return OverlapState(target, draft)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def put_row(layout: Layout, state: Any, slot: Array, row: Any) -> Any:
    return constrain_like(jax.tree.map(lambda s, r: s.at[slot].set(r[0]), state, row), layout)
