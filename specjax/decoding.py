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
from collections.abc import Generator, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from specjax import tree
from specjax.caches import empty_cache, read_prompt
from specjax.logprobs import Logprobs
from specjax.parallel import check_memory, hold, is_split, layout, mesh_of, row_parts, spread, to_host
from specjax.processors import LogitsProcessor, Processors, check_function, process
from specjax.sampling import IndependentDraw, Sampling, SharedDraw, warp
from specjax.types import (
    ABSENT,
    Block,
    ChoosesRules,
    DecodeState,
    Model,
    ModelOutput,
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
      logits_processor: a function of the user's, about one node: see `specjax.processors.LogitsProcessor`.
      num_logprobs: record log-probabilities of the emitted tokens, and of the so many best ones; None: of none.
    """

    target: Model
    proposer: Proposer
    rule: Rule
    eos: tuple[int, ...] = ()
    capacity: int = 512
    logits_processor: LogitsProcessor | None = None
    num_logprobs: int | None = None

    def __post_init__(self):
        if self.capacity < 2:
            raise ValueError(f"capacity={self.capacity}; it must hold a prompt token and a new one, so at least 2")
        if self.proposer.num_nodes > self.capacity:
            raise ValueError(
                f"a proposal of {self.proposer.num_nodes} nodes is larger than the capacity of {self.capacity} tokens: "
                "propose less, or raise the capacity"
            )
        if self.num_logprobs is not None and not 0 <= self.num_logprobs <= self.target.vocab_size:
            raise ValueError(
                f"num_logprobs={self.num_logprobs} is not allowed; it must be in [0, {self.target.vocab_size}], or None"
            )
        if self.logits_processor is not None:
            check_function(self.logits_processor, self.target.vocab_size, self.capacity)
        if isinstance(self.proposer, ChoosesRules):
            self.proposer.check_rule(self.rule)
        if self.proposer.is_chain:
            return
        if not self.target.reads_trees:
            raise ValueError(
                f"{type(self.proposer).__name__} proposes trees, but the target reads chains only (reads_trees=False: "
                "no tree mask, or a cache that commits no path); use a proposer of chains, such as DraftModel or NGram"
            )
        if getattr(self.rule, "chain_only", False):
            raise ValueError(
                f"{type(self.rule).__name__} judges chains only, and {type(self.proposer).__name__} proposes trees: "
                "use a rule for trees, such as Match() or Rejection(), or a proposer of chains"
            )

    def prefill(
        self,
        params: Params,
        prompt: Array | np.ndarray,
        prompt_length: Array | np.ndarray,
        *,
        limit: Array | np.ndarray,
        sampling: Sampling,
        key: Array,
        num_drafts: Array | np.ndarray | None = None,
        processors: Processors | None = None,
        eos: Array | np.ndarray | None = None,
    ) -> DecodeState:
        """Read the prompts.

        Args:
          params: arrays of the target and the proposer.  Where they lie on a mesh, the state will too, split by row.
          prompt: [B, P] int32, right-padded; another P is another compilation.
          prompt_length: [B] int32, at least 1.
          limit: [B] int32; a row stops when prompt and output reach this length; at most `capacity`.
          sampling: settings, one a row.
          key: [B] PRNG keys.  Rows with equal keys, prompts and settings give equal texts.
          num_drafts: [B] int32; guesses deeper than this are dropped, and 0 decodes a row plainly; None drops none.
          processors: penalties and the like, from `Processors.create`; None where all are off.
          eos: [B, ids] int32, ends of text of each row (`eos_of_rows`); those of the decoder by default.

        Raises:
          ValueError: where a prompt or a limit does not fit, or the devices have too little memory left (checked
            for concrete arrays, before any compilation).
        """
        if num_drafts is None:
            num_drafts = np.full(prompt.shape[0], self.proposer.max_depth, np.int32)
        self._check(prompt, prompt_length, limit, num_drafts)
        mesh = mesh_of(params.target)
        if len(prompt) % (parts := row_parts(mesh)):
            raise ValueError(
                f"{len(prompt)} rows, which {parts} devices along the mesh axis of rows do not divide, and "
                f"{len(prompt) + -len(prompt) % parts} would: pad with rows whose limit is their prompt_length"
            )
        eos = eos_of_rows([self.eos] * len(prompt)) if eos is None else eos
        given = prompt, prompt_length, limit, num_drafts, sampling, key, processors, eos
        placed = mesh, is_split(params.target), is_split(params.proposer)
        check_memory(_prefill, self, placed, params, *given)
        return _prefill(self, placed, params, *given)

    def step(self, params: Params, state: DecodeState) -> tuple[DecodeState, StepInfo]:
        """Propose, verify, commit.  Pure and not jitted: research code wraps it as it likes."""
        pending = _at(state.tokens, state.length - 1)
        draw = self._draw(state)
        warp_rows = functools.partial(self._warp, state)
        shared = getattr(self.proposer, "shares_cache", False)
        own = state.cache if shared else state.proposer
        proposal, own = self.proposer.propose(params.proposer, own, pending, draw, warp_rows)
        cache, proposer = (own, state.proposer) if shared else (state.cache, own)

        if self.proposer.is_chain:
            depth, mask = jnp.arange(proposal.tokens.shape[1]), None
        else:
            depth, mask = jax.vmap(tree.depth)(proposal.parent), jax.vmap(tree.ancestor_mask)(proposal.parent)
        # Descendants of a node are deeper than it: what is left is a tree.
        kept = depth <= state.num_drafts[:, None]
        proposal = dataclasses.replace(proposal, parent=jnp.where(kept, proposal.parent, ABSENT))
        positions = cache.length[:, None] + depth
        out = self._verify(params, proposal, positions, cache, mask)
        path = None
        if state.processors is not None:
            texts = functools.partial(tree.path_tokens, max_depth=self.proposer.max_depth)
            path = jax.vmap(texts)(proposal.tokens, proposal.parent)
        warped = warp_rows(out.logits, path)
        judge = functools.partial(self.rule, max_depth=self.proposer.max_depth)
        verdict = jax.vmap(judge)(draw, proposal, warped)

        accepted = jnp.take_along_axis(proposal.tokens, verdict.path, axis=1)  # the root, then the accepted drafts
        emitted, count, done = self._emit(state, accepted, verdict)
        # What is committed is the root and all that is emitted but the last: that one is pending now.
        cache = out.cache.commit(count) if self.proposer.is_chain else out.cache.commit(count, verdict.path)
        hidden = jnp.take_along_axis(out.hidden, verdict.path[..., None], axis=1)
        proposer = self.proposer.observe(params.proposer, proposer, Block(accepted, hidden, count))
        state = dataclasses.replace(
            state,
            tokens=_write(state.tokens, emitted, state.length),
            length=state.length + count,
            done=done,
            cache=cache,
            proposer=proposer,
            processors=None if state.processors is None else state.processors.observe(emitted, count),
            logprobs=self._record(state, verdict, emitted, out.logits, warped),
            stats=_count(state.stats, proposal, verdict, count, ~state.done),
        )
        return state, StepInfo(emitted, count, proposal, verdict, warped)

    def run(self, params: Params, state: DecodeState, max_steps: int | Array = 2**31 - 1) -> DecodeState:
        """Step until every row is done, or `max_steps` times: one XLA program, no host in between.

        The state is donated: its buffers are reused, and the one that was passed in is dead afterwards.
        """
        return _run(self, layout(state), params, state, jnp.asarray(max_steps, jnp.int32))

    def stream(self, params: Params, state: DecodeState, steps_per_chunk: int = 8) -> Generator[DecodeState, Any, None]:
        """`run` a few steps at a time, and yield the state after each chunk until every row is done.

        Read what you need before the next turn, which donates the yielded state.  `send` a bool [B] to stop rows.
        """
        if steps_per_chunk < 1:
            raise ValueError(f"steps_per_chunk={steps_per_chunk}; it must be at least 1")
        while not to_host(state.done).all():
            state = self.run(params, state, steps_per_chunk)
            stop = yield state
            if stop is not None:
                state = dataclasses.replace(state, done=state.done | jnp.asarray(stop))

    def insert(self, state: DecodeState, slot: int | Array, row: DecodeState) -> DecodeState:
        """Put the one row of `row` into `slot` of `state` (continuous batching).  `state` is donated.

        Raises:
          ValueError: the two were made with other kinds of settings, or for other shapes.
        """

        def shape(made):
            return jax.tree.structure(made), [leaf.shape[1:] for leaf in jax.tree.leaves(made)]

        if shape(state) != shape(row):
            raise ValueError(
                "the row and the batch are of different shapes: prefill both with the same decoder, and both without "
                "processors or both with Processors.create(..., every=True)"
            )
        return _insert(layout(state), state, jnp.asarray(slot), row)

    def _check(self, prompt: Any, prompt_length: Any, limit: Any, num_drafts: Any) -> None:
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
        if not isinstance(num_drafts, Tracer) and (least := np.asarray(num_drafts).min()) < 0:
            raise ValueError(f"num_drafts={least}; it must be 0 (plain decoding) or more")

    def _verify(
        self, params: Params, proposal: Proposal, positions: Array, cache: Any, mask: Array | None
    ) -> ModelOutput:
        """The target's pass over a proposal; where no row has a guess, over the roots alone, and 0 for the others."""
        num_nodes = proposal.tokens.shape[1]

        def read(width: int, cache: Any) -> ModelOutput:
            seen = None if mask is None else mask[:, :width, :width]
            out = self.target.apply(params.target, proposal.tokens[:, :width], positions[:, :width], cache, seen)
            logits, hidden = (jnp.pad(x, ((0, 0), (0, num_nodes - width), (0, 0))) for x in (out.logits, out.hidden))
            return ModelOutput(logits, hidden, out.cache)

        # A cache that does not keep scratch has another shape after another pass.
        if not (getattr(self.proposer, "may_abstain", False) and getattr(cache, "keeps_scratch", False)):
            return read(num_nodes, cache)
        guessed = (proposal.parent != ABSENT).any()
        shapes = jax.eval_shape(functools.partial(read, 1), cache)
        logits, hidden = (jnp.zeros(x.shape, x.dtype) for x in (shapes.logits, shapes.hidden))
        empty = ModelOutput(logits, hidden, cache)

        # Loops of one turn or none: what a branch returns would be copied, what a loop carries stays in place.
        def read_if(wanted: Array, width: int, before: ModelOutput) -> ModelOutput:
            def turn(carry):
                return jnp.zeros_like(wanted), read(width, carry[1].cache)

            return jax.lax.while_loop(lambda carry: carry[0], turn, (wanted, before))[1]

        return read_if(guessed, num_nodes, read_if(~guessed, 1, empty))

    def _draw(self, state: DecodeState) -> SharedDraw | IndependentDraw:
        """The randomness that the rule asks for, so that a proposer cannot be paired with another kind."""
        size, position = self.target.vocab_size, state.length - 1
        if self.rule.shared_noise:
            sampled = (state.sampling.temperature > 0).any()
            return SharedDraw.create(state.key, position, self.proposer.max_depth, size, sampled)
        return IndependentDraw.create(state.key, position, size)

    def _warp(self, state: DecodeState, logits: Array, path: Array | None = None) -> Array:
        """Logits [B, M, V] of nodes at the ends of `path` [B, M, D] -> logits of the distribution to sample."""
        # A draft with a vocabulary of its own has no use for settings about the target's tokens.
        if state.processors is not None and logits.shape[-1] == self.target.vocab_size:
            logits = process(state, logits, path, self.logits_processor, self.capacity)
        return warp(logits, state.sampling)

    def _emit(self, state: DecodeState, accepted: Array, verdict: Verdict) -> tuple[Array, Array, Array]:
        """The accepted drafts and then the next token, cut at an end of text and at the limit.

        accepted r a b b     num_accepted 2, next_token x     ->  emitted a b x .    count 3
        """
        rows = jnp.arange(len(accepted))
        emitted = jnp.roll(accepted, -1, axis=1).at[rows, verdict.num_accepted].set(verdict.next_token)
        place = jnp.arange(emitted.shape[1])
        count = jnp.minimum(verdict.num_accepted + 1, state.limit - state.length)
        ends = (emitted[..., None] == state.eos[:, None]).any(-1) & (place < count[:, None])
        count = jnp.where(ends.any(1), jnp.argmax(ends, axis=1).astype(jnp.int32) + 1, count)
        count = jnp.where(state.done, 0, count)
        done = state.done | ends.any(1) | (state.length + count >= state.limit)
        return emitted, count, done

    def _record(self, state: DecodeState, verdict: Verdict, emitted: Array, logits: Array, warped: Array) -> Any:
        """Log-probabilities of this step's tokens: the i-th of them was drawn after the i-th node of the path."""
        if self.num_logprobs is None:
            return None
        at = verdict.path[..., None]
        logits, warped = (jnp.take_along_axis(x, at, axis=1) for x in (logits, warped))
        found = Logprobs.measure(logits, warped, emitted, self.num_logprobs)
        return jax.tree.map(lambda buffer, new: _write(buffer, new, state.length), state.logprobs, found)


def eos_of_rows(ids: Iterable[Iterable[int]]) -> np.ndarray:
    """The token ids that end each row, as [B, ids] int32 padded with ABSENT; up to four ids are one shape."""
    rows = [sorted(set(row)) for row in ids]
    width = -(-max(4, *map(len, rows)) // 4) * 4
    return np.array([[*row, *[ABSENT] * (width - len(row))] for row in rows], np.int32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _prefill(decoder, placed, params, prompt, prompt_length, limit, num_drafts, sampling, key, processors, eos):
    rows, width = prompt.shape
    mesh, split_target, split_proposer = placed
    prompt = spread(prompt, mesh, False)
    # Behind the last committed slot there is room to stage a proposal, or the padded prompt.
    cache = empty_cache(decoder.target, rows, decoder.capacity, decoder.proposer.num_nodes)
    cache = spread(cache, mesh, split_target)
    seen = prompt_length - 1
    hidden, cache = read_prompt(decoder.target, params.target, prompt, seen, cache)
    tokens = jnp.zeros((rows, decoder.capacity + decoder.proposer.max_depth + 1), jnp.int32)
    zero = jnp.zeros(rows, jnp.int32)
    own, size = decoder.logits_processor is not None, decoder.target.vocab_size
    if own or processors is not None:
        processors = (processors or Processors()).begin(prompt, prompt_length, size, own)
    top = decoder.num_logprobs
    state = DecodeState(
        tokens=tokens.at[:, :width].set(prompt),
        length=prompt_length,
        limit=limit,
        num_drafts=num_drafts,
        done=prompt_length >= limit,
        cache=cache,
        proposer=None,
        key=key,
        sampling=sampling,
        eos=eos,
        processors=processors,
        logprobs=None if top is None else Logprobs.zeros(rows, tokens.shape[1], top),
        stats=Stats(zero, zero, zero, zero, zero),
    )
    begun = decoder.proposer.init(params.proposer, Block(prompt, hidden, seen), decoder.capacity)
    return dataclasses.replace(spread(state, mesh, split_target), proposer=spread(begun, mesh, split_proposer))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _run(decoder, layout, params, state, max_steps):
    def go_on(carry):
        return (carry[0] < max_steps) & ~carry[1].done.all()

    def body(carry):
        return carry[0] + 1, hold(decoder.step(params, carry[1])[0], layout)

    return hold(jax.lax.while_loop(go_on, body, (jnp.int32(0), state))[1], layout)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _insert(layout, state, slot, row):
    return hold(jax.tree.map(lambda s, r: s.at[slot].set(r[0]), state, row), layout)


def _at(x: Array, index: Array) -> Array:
    return jnp.take_along_axis(x, index[:, None], axis=1)[:, 0]


def _write(buffer: Array, new: Array, start: Array) -> Array:
    return jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0))(buffer, new, start)


def asked(proposal: Proposal, verdict: Verdict) -> Array:
    """[B, D + 1] bool: did the walk, at this depth, stand at a node with a child, so that a draft was tested?"""
    has_child = jax.vmap(lambda parent: (parent[None, :] == jnp.arange(parent.shape[0])[:, None]).any(1))(
        proposal.parent
    )
    depth = jnp.arange(verdict.path.shape[1])
    return jnp.take_along_axis(has_child, verdict.path, axis=1) & (depth <= verdict.num_accepted[:, None])


def _count(stats: Stats, proposal: Proposal, verdict: Verdict, count: Array, live: Array) -> Stats:
    tested = jnp.minimum(asked(proposal, verdict).sum(1, dtype=jnp.int32), count)
    proposed = (proposal.parent != ABSENT).sum(1, dtype=jnp.int32)
    return Stats(
        target_passes=stats.target_passes + live,
        emitted=stats.emitted + count,
        accepted=stats.accepted + jnp.minimum(verdict.num_accepted, count),
        tested=stats.tested + tested,
        proposed=stats.proposed + jnp.where(live, proposed, 0),
    )
