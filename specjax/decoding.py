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

from specjax import tree
from specjax.contract import Context, Model, Proposer, Rule
from specjax.given import check_given, check_slot
from specjax.logprobs import Logprobs
from specjax.parallel import check_memory, hold, is_split, layout, mesh_of, row_parts, to_host
from specjax.prefilling import eos_of_rows, start
from specjax.processors import LogitsProcessor, Processors, check_function, process
from specjax.sampling import IndependentDraw, Sampling, SharedDraw, keys_of_rows, warp
from specjax.tree import Tree
from specjax.types import (
    ABSENT,
    Block,
    DecodeState,
    ModelOutput,
    Params,
    Proposal,
    Stats,
    StepInfo,
    Verdict,
)
from specjax.verification import Verification


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
    rule: Rule = dataclasses.field(compare=False)  # `_rule_form` is compared: its numbers are data
    eos: tuple[int, ...] = ()
    capacity: int = 512
    logits_processor: LogitsProcessor | None = None
    num_logprobs: int | None = None
    _rule_form: Any = dataclasses.field(init=False, repr=False)

    def __post_init__(self):
        for name, part, kind in (
            ("target", self.target, Model),
            ("proposer", self.proposer, Proposer),
            ("rule", self.rule, Rule),
        ):
            if not isinstance(part, kind):
                given = (
                    f"the class {part.__name__}"
                    if isinstance(part, type)
                    else f"a {type(part).__name__}"
                )
                raise ValueError(
                    f"{name} is {given}; pass an instance of a subclass of specjax.contract.{kind.__name__}"
                )
        has_numbers = not jax.tree_util.all_leaves([self.rule])
        object.__setattr__(
            self, "_rule_form", jax.tree.structure(self.rule) if has_numbers else self.rule
        )
        if self.capacity < 2:
            raise ValueError(
                f"capacity={self.capacity}; it must hold a prompt token and a new one, so at least 2"
            )
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
        offered = self.target.num_taps
        if not set(self.proposer.taps) <= set(range(offered)):
            raise ValueError(
                f"{type(self.proposer).__name__} reads the target's layers {self.proposer.taps}, and the target offers "
                f"{f'those in [0, {offered - 1}]' if offered else 'none'}: pass the target that it was made for"
            )
        self.proposer.check(self.rule)
        if self.proposer.is_chain:
            return
        if not self.target.reads_trees:
            raise ValueError(
                f"{type(self.proposer).__name__} proposes trees, but the target reads chains only (reads_trees=False: "
                "no tree mask, or a cache that commits no path); use a proposer of chains, such as DraftModel or NGram"
            )
        if self.rule.chain_only:
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
          limit: [B] int32; a row stops when prompt and output reach this length; at most
            `capacity` and `target.max_positions`.
          sampling: settings, one a row.
          key: [B] PRNG keys, split from `specjax.make_key(seed)`.  Rows with equal keys, prompts
            and settings give equal texts.
          num_drafts: [B] int32; guesses deeper than this are dropped, and 0 decodes a row plainly; None drops none.
          processors: penalties and the like, from `Processors.create`; None where all are off.
          eos: [B, ids] int32, ends of text of each row (`eos_of_rows`); those of the decoder by default.

        Raises:
          ValueError: where a prompt or a limit does not fit, or the devices have too little memory left (checked
            for concrete arrays, before any compilation); for keys of another implementation than
            "threefry2x32", and for arrays of another shape or type (checked for traced ones too).
        """
        check_given(self.target, self.capacity, prompt, prompt_length, limit, num_drafts)
        key = keys_of_rows(key, len(prompt))
        if num_drafts is None:
            num_drafts = np.full(len(prompt), self.proposer.max_depth, np.int32)
        mesh = mesh_of(params.target)
        if len(prompt) % (parts := row_parts(mesh)):
            raise ValueError(
                f"{len(prompt)} rows, which {parts} devices along the mesh axis of rows do not divide, and "
                f"{len(prompt) + -len(prompt) % parts} would: pad with rows whose limit is their prompt_length"
            )
        eos = eos_of_rows([self.eos] * len(prompt)) if eos is None else eos
        rule = None
        if not jax.tree_util.all_leaves([self.rule]):  # its numbers are data, one a row
            rule = jax.tree.map(lambda x: np.full(len(prompt), x, np.float32), self.rule)
        given = prompt, prompt_length, limit, num_drafts, sampling, key, processors, eos, rule
        placed = mesh, is_split(params.target), is_split(params.proposer)
        check_memory(start, self, placed, params, *given)
        return start(self, placed, params, *given)

    def step(self, params: Params, state: DecodeState) -> tuple[DecodeState, StepInfo]:
        """`propose`, `verify`, `commit`.  Pure and not jitted, like each of them."""
        proposal, state = self.propose(params, state)
        return self.commit(params, state, proposal, self.verify(params, state, proposal))

    def propose(self, params: Params, state: DecodeState) -> tuple[Proposal, DecodeState]:
        """Draft a tree of tokens below the pending token of each row.

        It needs no parameters of the target, but for a proposer that shares them.
        """
        context = Context(
            pending=_at(state.tokens, state.length - 1),
            draw=self._draw(state),
            warp=functools.partial(self._warp, state),
            shared_noise=self.rule.shared_noise,
            wants_logits=self.rule.wants_logits,
            cache=state.cache,
        )
        field = "cache" if self.proposer.shares_cache else "proposer"
        proposal, after = self.proposer.propose(params.proposer, getattr(state, field), context)
        return proposal, dataclasses.replace(state, **{field: after})

    def verify(self, params: Params, state: DecodeState, proposal: Proposal) -> Verification:
        """Read the proposal in one pass of the target, and let the rule judge it.

        The proposal may be another than `propose` returned: the text stays exact for any.  Drafts
        deeper than a row's `num_drafts` are dropped.
        """
        is_chain, max_depth = self.proposer.is_chain, self.proposer.max_depth
        tree = jax.vmap(lambda parent: Tree.of(parent, max_depth, is_chain))(proposal.parent)
        # Descendants of a node are deeper than it, so what is left is a tree.
        kept = tree.depth <= state.num_drafts[:, None]
        tree = dataclasses.replace(tree, parent=jnp.where(kept, tree.parent, ABSENT))
        proposal = dataclasses.replace(proposal, parent=tree.parent)
        output = self._read(params, state, proposal, tree)
        path = (
            None if state.processors is None else jax.vmap(Tree.path_tokens)(tree, proposal.tokens)
        )
        logits = self._warp(state, output.logits, path)
        return Verification(self._judge(state, proposal, tree, logits), tree, output, logits)

    def commit(
        self, params: Params, state: DecodeState, proposal: Proposal, verification: Verification
    ) -> tuple[DecodeState, StepInfo]:
        """Keep the accepted drafts and the next token, up to an EOS or the row's limit."""
        verdict, tree, out = verification.verdict, verification.tree, verification.output
        proposal = dataclasses.replace(proposal, parent=tree.parent)
        path, num_accepted = _at(tree.path, verdict.node), _at(tree.depth, verdict.node)
        accepted = jnp.take_along_axis(
            proposal.tokens, path, axis=1
        )  # the root, then the accepted drafts
        emitted, count, done = self._emit(state, accepted, num_accepted, verdict.next_token)
        # The root and all emitted tokens but the last are committed; the last one is pending now.
        cache = out.cache.commit(count) if self.proposer.is_chain else out.cache.commit(count, path)
        hidden = jnp.take_along_axis(out.hidden, path[..., None], axis=1)
        features = (
            None
            if out.features is None
            else jnp.take_along_axis(out.features, path[..., None], axis=1)
        )
        block = Block(accepted, hidden, count, features)
        logprobs = self._record(state, path, emitted, out.logits, verification.logits)
        info = StepInfo(emitted, count, num_accepted, path, proposal, verdict, verification.logits)
        after = dataclasses.replace(
            state,
            tokens=_write(state.tokens, emitted, state.length),
            length=state.length + count,
            done=done,
            cache=cache,
            proposer=self.proposer.observe(params.proposer, state.proposer, block),
            processors=None
            if state.processors is None
            else state.processors.observe(emitted, count),
            logprobs=logprobs,
            stats=_count(state.stats, info, ~state.done),
        )
        return after, info

    def run(
        self, params: Params, state: DecodeState, max_steps: int | Array = 2**31 - 1
    ) -> DecodeState:
        """Step until every row is done, or `max_steps` times: one XLA program, no host in between.

        The state is donated: its buffers are reused, and the one that was passed in is dead afterwards.
        """
        return _run(self, layout(state), params, state, jnp.asarray(max_steps, jnp.int32))

    def stream(
        self, params: Params, state: DecodeState, steps_per_chunk: int = 8
    ) -> Generator[DecodeState, Any, None]:
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
          ValueError: the two were made with other kinds of settings, or for other shapes; `row` has
            several rows; or `slot` is no row of `state`.  A traced slot is not checked: one beyond
            the rows inserts nothing.
        """
        check_slot(slot, len(state.tokens), len(row.tokens))

        def shape(made):
            return jax.tree.structure(made), [leaf.shape[1:] for leaf in jax.tree.leaves(made)]

        if shape(state) != shape(row):
            raise ValueError(
                "the row and the batch are of different shapes: prefill both with the same decoder, and both without "
                "processors or both with Processors.create(..., every=True)"
            )
        return _insert(layout(state), state, jnp.asarray(slot), row)

    def _read(
        self, params: Params, state: DecodeState, proposal: Proposal, tree: Tree
    ) -> ModelOutput:
        """The target's pass; where no row has a draft, over the roots alone, and 0 for the others."""
        num_nodes, taps = proposal.tokens.shape[1], self.proposer.taps
        positions = state.cache.length[:, None] + tree.depth

        def read(width: int, cache: Any) -> ModelOutput:
            seen = None if self.proposer.is_chain else tree.ancestors[:, :width, :width]
            tokens, at = proposal.tokens[:, :width], positions[:, :width]
            # A model without taps need not know the word.
            out = self.target.apply(
                params.target, tokens, at, cache, seen, **({"taps": taps} if taps else {})
            )
            if width == num_nodes:
                return out
            padded = jax.tree.map(
                lambda x: jnp.pad(x, ((0, 0), (0, num_nodes - width), (0, 0))),
                (out.logits, out.hidden, out.features),
            )
            return ModelOutput(padded[0], padded[1], out.cache, padded[2])

        # A cache that does not keep scratch has another shape after another pass.
        if not (self.proposer.may_abstain and state.cache.keeps_scratch):
            return read(num_nodes, state.cache)
        drafted = (proposal.parent != ABSENT).any()
        shapes = jax.eval_shape(functools.partial(read, 1), state.cache)
        logits, hidden, features = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), (shapes.logits, shapes.hidden, shapes.features)
        )
        empty = ModelOutput(logits, hidden, state.cache, features)

        # Loops of at most one turn: XLA copies what a branch returns, and updates a loop's carry in place.
        def read_if(wanted: Array, width: int, before: ModelOutput) -> ModelOutput:
            def turn(carry: tuple[Array, ModelOutput]) -> tuple[Array, ModelOutput]:
                return jnp.zeros_like(wanted), read(width, carry[1].cache)

            return jax.lax.while_loop(lambda carry: carry[0], turn, (wanted, before))[1]

        return read_if(drafted, num_nodes, read_if(~drafted, 1, empty))

    def _judge(self, state: DecodeState, proposal: Proposal, tree: Tree, logits: Array) -> Verdict:
        given = (self._draw(state), proposal, tree, logits)
        if state.rule is None:
            return jax.vmap(self.rule)(*given)
        return jax.vmap(lambda rule, *row: rule(*row))(state.rule, *given)

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

    def _emit(
        self, state: DecodeState, accepted: Array, num_accepted: Array, next_token: Array
    ) -> tuple[Array, Array, Array]:
        """The accepted drafts and then the next token, cut at an end of text and at the limit.

        accepted r a b b     num_accepted 2, next_token x     ->  emitted a b x .    count 3
        """
        rows = jnp.arange(len(accepted))
        emitted = jnp.roll(accepted, -1, axis=1).at[rows, num_accepted].set(next_token)
        place = jnp.arange(emitted.shape[1])
        count = jnp.minimum(num_accepted + 1, state.limit - state.length)
        ends = (emitted[..., None] == state.eos[:, None]).any(-1) & (place < count[:, None])
        count = jnp.where(ends.any(1), jnp.argmax(ends, axis=1).astype(jnp.int32) + 1, count)
        count = jnp.where(state.done, 0, count)
        done = state.done | ends.any(1) | (state.length + count >= state.limit)
        return emitted, count, done

    def _record(
        self, state: DecodeState, path: Array, emitted: Array, logits: Array, warped: Array
    ) -> Any:
        """Log-probabilities of this step's tokens: the i-th of them was drawn after the i-th node of the path."""
        if self.num_logprobs is None:
            return None
        at = path[..., None]
        logits, warped = (jnp.take_along_axis(x, at, axis=1) for x in (logits, warped))
        found = Logprobs.measure(logits, warped, emitted, self.num_logprobs)
        return jax.tree.map(
            lambda buffer, new: _write(buffer, new, state.length), state.logprobs, found
        )


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
    """[B, N, ...], [B] -> [B, ...]"""
    return jax.vmap(lambda row, n: row[n])(x, index)


def _write(buffer: Array, new: Array, start: Array) -> Array:
    return jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0))(
        buffer, new, start
    )


def _count(stats: Stats, info: StepInfo, live: Array) -> Stats:
    asked = jax.vmap(tree.asked)(info.proposal.parent, info.path, info.num_accepted)
    tested = jnp.minimum(asked.sum(1, dtype=jnp.int32), info.count)
    proposed = (info.proposal.parent != ABSENT).sum(1, dtype=jnp.int32)
    return Stats(
        target_passes=stats.target_passes + live,
        emitted=stats.emitted + info.count,
        accepted=stats.accepted + jnp.minimum(info.num_accepted, info.count),
        tested=stats.tested + tested,
        proposed=stats.proposed + jnp.where(live, proposed, 0),
    )
