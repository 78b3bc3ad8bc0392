"""The decoder: five verbs over `(params, state)`, in terms of the protocols alone.

    prompt - prefill -> DecodeState ->[ propose -> verify -> commit ]* -> output

The last token of a row is always *pending*: decided, but not yet read by the target.  Prefill commits the prompt but
for its last token and samples nothing; each step commits exactly as many tokens as it emits.

    tokens   t h e _ c a t _ s a t            length 11      "t" at slot 10 is pending
    cache    t h e _ c a t _ s a              length 10      law: cache.length == length - 1
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from specjax import tree
from specjax.sampling import IndependentDraw, Sampling, SharedDraw, warp
from specjax.types import (
    ABSENT,
    Block,
    DecodeState,
    Model,
    Params,
    Proposal,
    Proposer,
    Rule,
    Stats,
    StepInfo,
    Verdict,
)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A target, a proposer and a rule.  Hashable: the static argument of every jit; arrays are in `Params`.

    Attributes:
      target: the model decoded for.
      proposer: where guesses come from.
      rule: which of them are kept.
      eos: token ids that end a row (the ending token is part of the output).
      capacity: the most tokens that a row can hold, prompt included.
    """

    target: Model
    proposer: Proposer
    rule: Rule
    eos: tuple[int, ...] = ()
    capacity: int = 512

    def __post_init__(self):
        if self.capacity < 2:
            raise ValueError(f"capacity={self.capacity}; it must hold a prompt token and a new one, so at least 2")

    def prefill(
        self,
        params: Params,
        prompt: Array | np.ndarray,
        prompt_length: Array | np.ndarray,
        *,
        limit: Array | np.ndarray,
        sampling: Sampling,
        key: Array,
    ) -> DecodeState:
        """Read the prompts.

        Args:
          params: arrays of the target and the proposer.
          prompt: [B, P] int32, right-padded; another P is another compilation.
          prompt_length: [B] int32, at least 1.
          limit: [B] int32; a row stops when prompt and output reach this length; at most `capacity`.
          sampling: settings, one a row.
          key: [B] PRNG keys.  Rows with equal keys, prompts and settings give equal texts.

        Raises:
          ValueError: where a prompt or a limit does not fit (checked for concrete arrays, before any compilation).
        """
        self._check(prompt, prompt_length, limit)
        return _prefill(self, params, prompt, prompt_length, limit, sampling, key)

    def step(self, params: Params, state: DecodeState) -> tuple[DecodeState, StepInfo]:
        """Propose, verify, commit.  Pure and not jitted: research code wraps it as it likes."""
        pending = _at(state.tokens, state.length - 1)
        draw = self._draw(state)

        def warp_rows(logits):
            return warp(logits, state.sampling)

        proposal, proposer = self.proposer.propose(params.proposer, state.proposer, pending, draw, warp_rows)

        if self.proposer.is_chain:
            depth, mask = jnp.arange(proposal.tokens.shape[1]), None
        else:
            depth, mask = jax.vmap(tree.depth)(proposal.parent), jax.vmap(tree.ancestor_mask)(proposal.parent)
        positions = state.cache.length[:, None] + depth
        out = self.target.apply(params.target, proposal.tokens, positions, state.cache, mask)
        judge = functools.partial(self.rule, max_depth=self.proposer.max_depth)
        verdict = jax.vmap(judge)(draw, proposal, warp_rows(out.logits))

        accepted = jnp.take_along_axis(proposal.tokens, verdict.path, axis=1)  # the root, then the accepted drafts
        emitted, count, done = self._emit(state, accepted, verdict)
        # What is committed is the root and all that is emitted but the last: that one is pending now.
        cache = out.cache.commit(count, None if self.proposer.is_chain else verdict.path)
        hidden = jnp.take_along_axis(out.hidden, verdict.path[..., None], axis=1)
        proposer = self.proposer.observe(params.proposer, proposer, Block(accepted, hidden, count))
        state = dataclasses.replace(
            state,
            tokens=_write(state.tokens, emitted, state.length),
            length=state.length + count,
            done=done,
            cache=cache,
            proposer=proposer,
            stats=_count(state.stats, proposal, verdict, count, ~state.done),
        )
        return state, StepInfo(emitted, count, proposal, verdict)

    def run(self, params: Params, state: DecodeState, max_steps: int | Array = 2**31 - 1) -> DecodeState:
        """Step until every row is done, or `max_steps` times: one XLA program, no host in between.

        The state is donated: its buffers are reused, and the one that was passed in is dead afterwards.
        """
        return _run(self, params, state, jnp.asarray(max_steps, jnp.int32))

    def stream(self, params: Params, state: DecodeState, steps_per_chunk: int = 8) -> Generator[DecodeState, Any, None]:
        """`run` a few steps at a time, and yield the state after each chunk until every row is done.

        Read what you need before the next turn, which donates the yielded state.  `send` a bool [B] to stop rows.
        """
        if steps_per_chunk < 1:
            raise ValueError(f"steps_per_chunk={steps_per_chunk}; it must be at least 1")
        while not np.asarray(state.done).all():
            state = self.run(params, state, steps_per_chunk)
            stop = yield state
            if stop is not None:
                state = dataclasses.replace(state, done=state.done | jnp.asarray(stop))

    def insert(self, state: DecodeState, slot: int | Array, row: DecodeState) -> DecodeState:
        """Put the one row of `row` into `slot` of `state` (continuous batching).  `state` is donated."""
        return _insert(state, jnp.asarray(slot), row)

    def _check(self, prompt: Any, prompt_length: Any, limit: Any) -> None:
        if prompt.shape[1] > self.capacity:
            raise ValueError(
                f"prompts padded to {prompt.shape[1]} tokens do not fit a capacity of {self.capacity}: "
                "raise the decoder's capacity, or shorten the prompt"
            )
        if isinstance(prompt_length, Tracer) or isinstance(limit, Tracer):
            return
        lengths, limits = np.asarray(prompt_length), np.asarray(limit)
        if lengths.min() < 1:
            raise ValueError(f"prompt {int(lengths.argmin())} is empty; a prompt needs at least one token")
        if lengths.max() > prompt.shape[1]:
            raise ValueError(f"prompt_length {lengths.max()} is longer than the {prompt.shape[1]} tokens given")
        if limits.max() > self.capacity:
            raise ValueError(f"limit={limits.max()} is beyond the capacity of {self.capacity}: raise the capacity")

    def _draw(self, state: DecodeState) -> SharedDraw | IndependentDraw:
        """The randomness that the rule asks for, so that a proposer cannot be paired with another kind."""
        size, position = self.target.vocab_size, state.length - 1
        if self.rule.shared_noise:
            sampled = (state.sampling.temperature > 0).any()
            return SharedDraw.create(state.key, position, self.proposer.max_depth, size, sampled)
        return IndependentDraw.create(state.key, position, size)

    def _emit(self, state: DecodeState, accepted: Array, verdict: Verdict) -> tuple[Array, Array, Array]:
        """The accepted drafts and then the next token, cut at an end of text and at the limit.

        accepted r a b b     num_accepted 2, next_token x     ->  emitted a b x .    count 3
        """
        rows = jnp.arange(len(accepted))
        emitted = jnp.roll(accepted, -1, axis=1).at[rows, verdict.num_accepted].set(verdict.next_token)
        place = jnp.arange(emitted.shape[1])
        count = jnp.minimum(verdict.num_accepted + 1, state.limit - state.length)
        ends = jnp.isin(emitted, jnp.array(self.eos, jnp.int32)) & (place < count[:, None])
        count = jnp.where(ends.any(1), jnp.argmax(ends, axis=1).astype(jnp.int32) + 1, count)
        count = jnp.where(state.done, 0, count)
        done = state.done | ends.any(1) | (state.length + count >= state.limit)
        return emitted, count, done


@functools.partial(jax.jit, static_argnums=0)
def _prefill(decoder, params, prompt, prompt_length, limit, sampling, key):
    rows, width = prompt.shape
    # Behind the last committed slot there is room to stage a proposal, or the padded prompt.
    cache = decoder.target.init_cache(rows, decoder.capacity + decoder.proposer.num_nodes)
    positions = jnp.broadcast_to(jnp.arange(width), (rows, width))
    out = decoder.target.apply(params.target, prompt, positions, cache)
    seen = prompt_length - 1
    tokens = jnp.zeros((rows, decoder.capacity + decoder.proposer.max_depth + 1), jnp.int32)
    zero = jnp.zeros(rows, jnp.int32)
    return DecodeState(
        tokens=tokens.at[:, :width].set(prompt),
        length=prompt_length,
        limit=limit,
        done=prompt_length >= limit,
        cache=out.cache.commit(seen),
        proposer=decoder.proposer.init(params.proposer, Block(prompt, out.hidden, seen), decoder.capacity),
        key=key,
        sampling=sampling,
        stats=Stats(zero, zero, zero, zero, zero),
    )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _run(decoder, params, state, max_steps):
    def go_on(carry):
        return (carry[0] < max_steps) & ~carry[1].done.all()

    def body(carry):
        return carry[0] + 1, decoder.step(params, carry[1])[0]

    return jax.lax.while_loop(go_on, body, (jnp.int32(0), state))[1]


@functools.partial(jax.jit, donate_argnums=0)
def _insert(state, slot, row):
    return jax.tree.map(lambda s, r: s.at[slot].set(r[0]), state, row)


def _at(x: Array, index: Array) -> Array:
    return jnp.take_along_axis(x, index[:, None], axis=1)[:, 0]


def _write(buffer: Array, new: Array, start: Array) -> Array:
    return jax.vmap(lambda b, n, s: jax.lax.dynamic_update_slice(b, n, (s,)))(buffer, new, start)


def _count(stats: Stats, proposal: Proposal, verdict: Verdict, count: Array, live: Array) -> Stats:
    """A draft was tested where the walk stood at its parent: on the path, at a node with a child."""
    has_child = jax.vmap(lambda parent: (parent[None, :] == jnp.arange(parent.shape[0])[:, None]).any(1))(
        proposal.parent
    )
    asked = jnp.take_along_axis(has_child, verdict.path, axis=1)
    asked = asked & (jnp.arange(verdict.path.shape[1]) <= verdict.num_accepted[:, None])
    tested = jnp.minimum(asked.sum(1, dtype=jnp.int32), count)
    proposed = (proposal.parent != ABSENT).sum(1, dtype=jnp.int32)
    return Stats(
        target_passes=stats.target_passes + live,
        emitted=stats.emitted + count,
        accepted=stats.accepted + jnp.minimum(verdict.num_accepted, count),
        tested=stats.tested + tested,
        proposed=stats.proposed + jnp.where(live, proposed, 0),
    )
