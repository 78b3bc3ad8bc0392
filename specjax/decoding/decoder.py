"""The decoder: functions over `(params, state)` that use the classes of `specjax.contract` only.

    prompt - prefill -> DecodeState ->[ propose -> verify -> commit ]* -> output

The last token of a row is always *pending*: it is part of the text, but the target has not read it
yet.  Prefill commits the prompt without its last token and samples nothing.  Each step commits
exactly as many tokens as it emits.

    tokens   t h e _ c a t _ s a t            length 11      "t" at slot 10 is pending
    cache    t h e _ c a t _ s a              length 10      always length - 1
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax._internal.checks import within
from specjax._internal.control_flow import apply_if
from specjax._internal.jit_cache import programs, structure_of
from specjax._internal.platforms import lowering_platforms, prefers_one_pass
from specjax._internal.row_writes import write
from specjax.contract import Cache, Context, Draw, Model, Proposer, Resting, Rule, Settled
from specjax.decoding.changed_rows import Layout, insert, stopped
from specjax.decoding.commit import count, emit, record
from specjax.decoding.inputs import (
    RowInputs,
    check_fit,
    check_function,
    check_given,
    check_slot,
)
from specjax.decoding.prefill import check_memory, eos_of_rows, start
from specjax.parallel import (
    constrain_like,
    is_split,
    layout,
    mesh_of,
    row_parts,
    to_host,
)
from specjax.processors import (
    LogitsProcessor,
    Processors,
    forced_tokens,
    process,
)
from specjax.sampling import (
    Drawn,
    IndependentDraw,
    PositionDraw,
    Sampling,
    SharedDraw,
    argmax,
    draw_at_once,
    draws_at_once,
    keys_of_rows,
    warp,
)
from specjax.tree import Tree
from specjax.types import (
    ABSENT,
    ArrayTree,
    Block,
    DecodeState,
    ModelOutput,
    Params,
    Proposal,
    StepInfo,
    Verdict,
)

_ONE_PASS = 64
"""The most nodes of all rows that a GPU always reads: their pass takes as long as one token's."""


_SMALL = 4096
"""The most tokens of a vocabulary whose nodes are judged by a program for each width: one after the
other takes up to half as long again as the pass of a small model, and saves less to compile."""


_Until = tuple[np.ndarray, np.ndarray]
"""A number of steps [], and rows [B] bool."""

_Steps = tuple[Array, DecodeState]
"""The number of steps that were taken [], and the state after them."""

_Made = tuple[Verdict, ModelOutput, Array]
"""Verdicts, the output of the target, and the warped logits."""


@struct.dataclass
class Verification:
    """The judgement of a proposal by a pass of the target.

    It is the result of `Decoder.verify`, which `Decoder.commit` takes.
    """

    verdict: Verdict  # of each row
    tree: Tree  # of each row, without drafts that are deeper than the row's `num_drafts`
    output: ModelOutput  # of the target's pass; the proposal is staged in its cache
    logits: Array  # [B, N, V] float32; the target's warped logits after each node
    drawn: Drawn | None = None  # of a decoder that draws at once


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A target, a proposer and a rule.

    It is hashable, since it is a static argument of every jit.  The arrays are in `Params`.

    Attributes:
      target: the model whose text is decoded.
      proposer: makes the drafts.
      rule: decides which drafts are accepted.
      eos: token ids that end a row (the ending token is part of the output).
      capacity: the most tokens that a row can hold, prompt included.
      logits_processor: a user's function: see `specjax.processors.LogitsProcessor`.
      num_logprobs: record the log-probability of each emitted token, and of this many most probable
        tokens; None records nothing.
      draws_at_once: on one CPU, warp, draw and measure in one kernel instead of several passes over
        the logits.  The tokens are the same.
    """

    target: Model
    proposer: Proposer
    rule: Rule = dataclasses.field(compare=False)  # `_rule_form` is compared instead
    eos: tuple[int, ...] = ()
    capacity: int = 512
    logits_processor: LogitsProcessor | None = None
    num_logprobs: int | None = None
    draws_at_once: bool = False
    # The rule without its numbers, which are traced.
    _rule_form: object = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, part, kind in (
            ("target", self.target, Model),
            ("proposer", self.proposer, Proposer),
            ("rule", self.rule, Rule),
        ):
            if not isinstance(part, kind):
                called = (
                    f"the class {part.__name__}"
                    if isinstance(part, type)
                    else f"a {type(part).__name__}"
                )
                raise ValueError(
                    f"{name} is {called}; "
                    f"pass an instance of a subclass of specjax.contract.{kind.__name__}"
                )
        has_numbers = not jax.tree_util.all_leaves([self.rule])
        form = structure_of(self.rule) if has_numbers else self.rule
        object.__setattr__(self, "_rule_form", form)
        within("capacity", self.capacity, 2, note=", for a prompt token and a new one")
        if self.proposer.num_nodes > self.capacity:
            raise ValueError(
                f"a proposal of {self.proposer.num_nodes} nodes is larger than the capacity of "
                f"{self.capacity} tokens: propose fewer, or raise the capacity"
            )
        if self.num_logprobs is not None:
            within("num_logprobs", self.num_logprobs, 0, self.target.vocab_size, ", or be None")
        if self.logits_processor is not None:
            check_function(self.logits_processor, self.target.vocab_size, self.capacity)
        check_fit(self.target, self.proposer, self.rule)

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
        documents: Array | np.ndarray | None = None,
    ) -> DecodeState:
        """Reads the prompts.

        Args:
          params: arrays of the target and the proposer.  If they are on a mesh, the state will be
            on it too, split by row.
          prompt: [B, P] int32, right-padded; another P is another compilation.
          prompt_length: [B] int32, at least 1.
          limit: [B] int32; a row stops when prompt and output reach this length; at most
            `capacity`, and one more than `target.max_positions`.
          sampling: settings, one per row.
          key: [B] PRNG keys, split from `specjax.make_key(seed)`.  Rows with equal keys, prompts
            and settings give equal texts.
          num_drafts: [B] int32; drafts deeper than this are dropped, and 0 is plain decoding; None
            drops no drafts.
          processors: penalties and similar settings, from `Processors.create`; None if all are off.
          eos: [B, ids] int32, the EOS ids of each row (`eos_of_rows`); by default the decoder's.
          documents: [B, X] int32, as in `Block.documents`; another X is another compilation.

        Raises:
          ValueError: a prompt or a limit does not fit, or the devices have too little free memory
            (checked only for concrete arrays, before any compilation); a key is not of the
            implementation "threefry2x32", or an array has another shape or type (checked for traced
            arrays too).
        """
        check_given(self.target, self.capacity, prompt, prompt_length, limit, num_drafts)
        key = keys_of_rows(key, len(prompt))
        if num_drafts is None:
            num_drafts = np.full(len(prompt), self.proposer.max_depth, np.int32)
        mesh = mesh_of(params.target)
        if len(prompt) % (parts := row_parts(mesh)):
            raise ValueError(
                f"{len(prompt)} rows do not divide among the {parts} devices along the mesh axis "
                f"of rows: pad to {len(prompt) + -len(prompt) % parts} rows, where the limit of a "
                "padding row is its prompt_length"
            )
        eos = eos_of_rows([self.eos] * len(prompt)) if eos is None else eos
        inputs = RowInputs(
            prompt, prompt_length, limit, num_drafts, sampling, key, processors, eos,
            self.numbers(len(prompt)), documents,
        )  # fmt: skip
        placed = mesh, is_split(params.target), is_split(params.proposer)
        check_memory(self, placed, params, inputs)
        return start(self, placed, params, inputs)

    def numbers(self, rows: int) -> Rule | None:
        """Returns the rule with its numbers for each row, which are traced; None without any."""
        if jax.tree_util.all_leaves([self.rule]):
            return None
        return jax.tree.map(lambda x: np.full(rows, x, np.float32), self.rule)

    def step(self, params: Params, state: DecodeState) -> tuple[DecodeState, StepInfo]:
        """Runs `propose`, `verify` and `commit`.  It is pure and not jitted, like each of them."""
        # Once, since XLA would compute the same noise twice.  A proposer of several widths often
        # needs none, and the verification of fewer nodes needs less.
        draw = None if self.proposer.narrower else self._draw(state)
        # The scopes name the parts of a step in profiles and in compiled programs.
        with jax.named_scope("propose"):
            proposal, state = self.propose(params, state, draw)
        with jax.named_scope("verify"):
            verified = self.verify(params, state, proposal, draw)
        with jax.named_scope("commit"):
            return self.commit(params, state, proposal, verified)

    def propose(
        self, params: Params, state: DecodeState, draw: Draw | None = None
    ) -> tuple[Proposal, DecodeState]:
        """Drafts a tree of tokens below the pending token of each row.

        Only `params.proposer` is used.
        """
        shared, sampled = self.rule.shared_noise, (state.sampling.temperature > 0).any()
        if draw is None and shared:
            draw = PositionDraw(state.key, state.cache.length, self.target.vocab_size)
        else:
            sampled = None
        context = Context(
            pending=_at(state.tokens, state.cache.length),
            draw=self._draw(state) if draw is None else draw,
            warp=functools.partial(self._warp, state),
            shared_noise=shared,
            wants_logits=self.rule.wants_logits,
            cache=state.cache,
            num_drafts=jnp.where(state.done, 0, state.num_drafts),
            remaining=state.limit - state.length,
            sampled=sampled,
            text_is_fixed=self.rule.fixes_text(),
            forced=forced_tokens(state),
            length=state.length,
        )
        if self.proposer.shares_cache:
            proposal, cache = self.proposer.propose(params.proposer, state.cache, context)
            return proposal, dataclasses.replace(state, cache=cache)
        proposal, after = self.proposer.propose(params.proposer, state.proposer, context)
        return proposal, dataclasses.replace(state, proposer=after)

    def verify(
        self, params: Params, state: DecodeState, proposal: Proposal, draw: Draw | None = None
    ) -> Verification:
        """Reads the proposal in one pass of the target, and applies the rule.

        The proposal need not come from `propose`: the text is exact for any proposal that is as
        `Proposal` says.  Drafts deeper than a row's `num_drafts` are dropped.
        """
        is_chain, max_depth = self.proposer.is_chain, self.proposer.max_depth
        tree = jax.vmap(lambda parent: Tree.of(parent, max_depth, is_chain))(proposal.parent)
        # Descendants are deeper than their node, so the remaining nodes still form a tree.
        allowed = tree.depth <= state.num_drafts[:, None]
        tree = dataclasses.replace(tree, parent=jnp.where(allowed, tree.parent, ABSENT))
        proposal = dataclasses.replace(proposal, parent=tree.parent)

        reading = params.target, state, proposal, tree
        num_nodes = proposal.tokens.shape[1]
        widens = state.cache.widened(num_nodes) is not None
        narrower = self.proposer.narrower if widens else ()
        if prefers_one_pass() and not self.target.sparse and proposal.tokens.size <= _ONE_PASS:
            narrower = ()
        if not narrower:
            output = self._read(num_nodes, state.cache, *reading)
            if self._draws_at_once(state):
                drawn = self._draw_at_once(state, proposal, tree, output)
                verdict = jax.vmap(self.rule.walk)(proposal, drawn.token)
                logits = self._warp(state, output.logits)  # computed only if a caller reads it
                return Verification(verdict, tree, output, logits, drawn)
            verdict, logits = self._judge(num_nodes, state, proposal, tree, output, draw)
            return Verification(verdict, tree, output, logits)
        # The narrowest width that holds the drafts of all rows.
        widths = (*narrower, num_nodes)
        last = jnp.max(jnp.where(proposal.parent != ABSENT, jnp.arange(num_nodes), 0))
        chosen = jnp.searchsorted(jnp.array(widths), last + 1, method="compare_all")

        def few(width: int, cache: Cache) -> _Made:
            """Reads, warps and judges the first nodes; the results of the others are 0."""
            output = self._read(width, cache, *reading)
            verdict, logits = self._judge(width, state, proposal, tree, output, draw)
            if width == num_nodes:
                return verdict, output, logits
            padded = jax.tree.map(
                lambda x: jnp.pad(x, ((0, 0), (0, num_nodes - width), (0, 0))),
                (output.logits, output.hidden, output.features, logits),
            )
            cache = output.staged.widened(num_nodes)
            return verdict, ModelOutput(padded[0], padded[1], cache, padded[2]), padded[3]

        # The shapes and the program of the narrowest width are of one trace.
        narrowest = jax.jit(functools.partial(few, widths[0]))
        shapes = jax.eval_shape(narrowest, state.cache)
        bare = dataclasses.replace(shapes[1], cache=None)
        verdict, output, logits = _zeros((shapes[0], bare, shapes[2]))
        cache = state.cache.staged_as(shapes[1].staged)
        made = verdict, dataclasses.replace(output, cache=cache), logits

        def reader(width: int) -> Callable[[_Made], _Made]:
            read = narrowest if width == widths[0] else functools.partial(few, width)
            return lambda made: read(made[1].staged)

        # Warping, drawing and judging take as long to compile as a pass of the target.
        by_node, large = self.rule.by_node and draw is None, self.target.vocab_size > _SMALL
        own = widths
        if by_node and self.proposer.brief:
            own = ()
        elif by_node and large and len(widths) > 2:
            own = widths[:1]
        for index, width in enumerate(own):
            with jax.named_scope("fewer_drafts") if width < num_nodes else nullcontext():
                made = apply_if(chosen == index, reader(width), made)

        def fill(width: int, known: ModelOutput) -> ModelOutput:
            output = self._read(width, known.staged, *reading)
            # In place: what is read of few tokens is a small part of these arrays.
            filled = jax.tree.map(
                lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, 0, 1),
                (known.logits, known.hidden, known.features),
                (output.logits, output.hidden, output.features),
            )
            cache = output.staged.widened(num_nodes) if width < num_nodes else output.staged
            return ModelOutput(filled[0], filled[1], cache, filled[2])

        def many(made: _Made) -> _Made:
            """Reads at one of the other widths, and judges node by node."""
            output = dataclasses.replace(made[1], logits=jnp.zeros_like(made[1].logits))
            for index, width in enumerate(widths[len(own) :], start=len(own)):
                with jax.named_scope("fewer_drafts") if width < num_nodes else nullcontext():
                    output = apply_if(chosen == index, functools.partial(fill, width), output)
            verdict, logits = self._judge_nodes(state, proposal, tree, output, last + 1)
            return verdict, output, logits

        if not own:
            made = many(made)
        elif own != widths:
            made = apply_if(chosen > 0, many, made)
        verdict, output, logits = made
        return Verification(verdict, tree, output, logits)

    def _read(
        self,
        width: int,
        cache: Cache,
        params: ArrayTree,
        state: DecodeState,
        proposal: Proposal,
        tree: Tree,
    ) -> ModelOutput:
        """Reads the first `width` nodes."""
        positions = (state.cache.length[:, None] + tree.depth)[:, :width]
        seen = None if self.proposer.is_chain else tree.ancestors[:, :width, :width]
        tokens = proposal.tokens[:, :width]
        return self.target.apply(params, tokens, positions, cache, seen, taps=self.proposer.taps)

    def _judge(
        self,
        width: int,
        state: DecodeState,
        proposal: Proposal,
        tree: Tree,
        output: ModelOutput,
        draw: Draw | None,
    ) -> tuple[Verdict, Array]:
        """Warps the logits after the first `width` nodes, and judges the drafts among them."""
        drafts = jax.tree.map(lambda x: x[:, :width], proposal)
        part = jax.tree.map(lambda x: x[:, :width], tree)
        part = part.replace(ancestors=part.ancestors[..., :width])
        paths = state.processors and jax.vmap(Tree.path_tokens)(part, drafts.tokens)
        logits = self._warp(state, output.logits, paths)
        row = (self._draw(state, width) if draw is None else draw, drafts, part, logits)
        if state.rule is None:
            return jax.vmap(self.rule)(*row), logits
        return jax.vmap(lambda rule, *row: rule(*row))(state.rule, *row), logits

    def _draws_at_once(self, state: DecodeState) -> bool:
        """Returns whether a kernel draws the token after each node."""
        return (
            self.draws_at_once
            and self.rule.by_node
            and self.target.one_cpu
            and state.processors is None
            and draws_at_once(state.key, self.target.vocab_size)
        )

    def _draw_at_once(
        self, state: DecodeState, proposal: Proposal, tree: Tree, output: ModelOutput
    ) -> Drawn:
        """Returns the token that the rule draws after each node, and its log-probabilities."""
        width = proposal.tokens.shape[1]

        def one_by_one() -> Array:
            noise = jax.vmap(lambda draw, depth: draw.noise(jnp.arange(width), depth))(
                self._draw(state, width), tree.depth
            )
            return argmax(self._warp(state, output.logits) + noise)

        position = state.cache.length[:, None] + 1 + tree.depth
        sums = self.num_logprobs is not None
        return draw_at_once(output.logits, state.sampling, state.key, position, sums, one_by_one)

    def _judge_nodes(
        self, state: DecodeState, proposal: Proposal, tree: Tree, output: ModelOutput, count: Array
    ) -> tuple[Verdict, Array]:
        """Judges as `_judge` the first `count` nodes, one after the other, by one small program."""
        known: Processors | None = state.processors
        masks = None if known is None else known.masks
        paths = known and jax.vmap(Tree.path_tokens)(tree, proposal.tokens)
        root = jnp.zeros(1, jnp.int32)

        def at(x: Array, n: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, n, 1, 1)

        def put(x: Array, new: Array, n: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(x, new, n, 1)

        def noise(n: Array) -> Array:
            drawn = self._draw(state, 1, at(tree.depth, n)[:, 0])
            return jax.vmap(lambda draw: draw.noise(root, root))(drawn)

        def turn(n: Array, made: tuple[Array, Array]) -> tuple[Array, Array]:
            here = state
            if known is not None:
                mask = None if masks is None else at(jnp.asarray(masks), n)
                alone = dataclasses.replace(known, masks=mask)
                here = dataclasses.replace(state, processors=alone)
            path = None if paths is None else at(paths, n)
            warped = self._warp(here, at(output.logits, n), path)
            return put(made[0], warped, n), put(made[1], argmax(warped + noise(n)), n)

        begun = jnp.zeros(output.logits.shape, jnp.float32), jnp.zeros_like(proposal.tokens)
        logits, wanted = jax.lax.fori_loop(0, count, turn, begun)
        return jax.vmap(self.rule.walk)(proposal, wanted), logits

    def commit(
        self, params: Params, state: DecodeState, proposal: Proposal, verification: Verification
    ) -> tuple[DecodeState, StepInfo]:
        """Commits the accepted drafts and the next token, up to an EOS or the row's limit."""
        verdict, tree, out = verification.verdict, verification.tree, verification.output
        proposal = dataclasses.replace(proposal, parent=tree.parent)
        path, num_accepted = _at(tree.path, verdict.node), _at(tree.depth, verdict.node)
        # The root, then the accepted drafts.
        accepted = jnp.take_along_axis(proposal.tokens, path, axis=1)
        emitted, new, done = emit(state, accepted, num_accepted, verdict.next_token)
        # The root and all emitted tokens but the last are committed; the last one is pending now.
        cache = out.staged.commit(new) if self.proposer.is_chain else out.staged.commit(new, path)
        at = path[..., None]
        hidden = jnp.take_along_axis(out.hidden, at, axis=1)
        features = None if out.features is None else jnp.take_along_axis(out.features, at, axis=1)
        block = Block(accepted, hidden, new, features)
        processors: Processors | None = state.processors
        judged = verification.logits if verification.drawn is None else verification.drawn
        logprobs = record(state, path, emitted, out.logits, judged, self.num_logprobs)
        info = StepInfo(emitted, new, num_accepted, path, proposal, verdict, verification.logits)
        after = dataclasses.replace(
            state,
            tokens=write(state.tokens, emitted, state.length),
            length=state.length + new,
            done=done,
            cache=cache,
            proposer=self.proposer.observe(params.proposer, state.proposer, block),
            processors=None if processors is None else processors.observe(emitted, new),
            logprobs=logprobs,
            stats=count(state.stats, info, ~state.done),
        )
        return after, info

    def at_rest(self, state: DecodeState) -> Decoder | None:
        """Returns the decoder of steps in which the proposer rests; None: it has none.

        Such a step decodes plainly.  Where the text depends on what is drafted there is none.
        """
        proposer = self.proposer
        if not proposer.rests or not self.rule.fixes_text():
            return None
        if state.cache.widened(proposer.num_nodes) is None:
            return None
        return dataclasses.replace(self, proposer=Resting(proposer))

    def settled(self, state: DecodeState) -> Decoder | None:
        """Returns the decoder of steps in which the proposer drafts without a choice, or None.

        A CPU takes less time for a step without branches.  Where the text depends on what is
        drafted there is none, as for `at_rest`.
        """
        proposer = self.proposer
        if not proposer.settles or not self.rule.fixes_text() or not self.target.one_cpu:
            return None
        if state.cache.widened(proposer.num_nodes) is None:
            return None
        return dataclasses.replace(self, proposer=Settled(proposer))

    def run(
        self, params: Params, state: DecodeState, max_steps: int | Array = 2**31 - 1
    ) -> DecodeState:
        """Steps until every row is done, or `max_steps` times, in one XLA program.

        The state is donated: its buffers are reused, and the state passed in cannot be used again.
        """
        # Of a number nothing is computed here, which would wait for the device.
        traced = isinstance(max_steps, Array)
        steps = jnp.asarray(max_steps, jnp.int32) if traced else np.array(max_steps, np.int32)
        return _run(self, layout(state), params, state, steps)

    def runner(
        self, params: Params, state: DecodeState
    ) -> Callable[[Params, DecodeState, int, _Until], DecodeState]:
        """Returns `run` for states and parameters of this structure and these shardings.

        A call takes the host less time, since the structure is not looked at again.  Its last
        argument shortens it: when one of those rows is done, it ends after so many steps in all.
        """
        one, rows = np.array(1, np.int32), np.zeros(len(state.tokens), bool)
        program = _run.bound(self, layout(state), params, state, one, (one, rows))
        return lambda params, state, steps, until: program(
            params, state, np.array(steps, np.int32), until
        )

    def lower(
        self, params: Params, state: DecodeState, platform: str | None = None
    ) -> jax.stages.Lowered:
        """Returns the program of `run`, to be compiled ahead of time, as by `lower(...).compile()`.

        Args:
          params, state: arrays, or a `jax.ShapeDtypeStruct` for each, with its sharding.
          platform: "cpu", "gpu", "cuda", "rocm" or "tpu", present or not; by default the platform
            of the arrays.
        """
        names, steps = lowering_platforms(platform), jax.ShapeDtypeStruct((), jnp.int32)
        return _run.trace(self, layout(state), params, state, steps).lower(lowering_platforms=names)

    def stream(
        self, params: Params, state: DecodeState, steps_per_chunk: int = 8
    ) -> Generator[DecodeState, Array | np.ndarray | None, None]:
        """Runs a few steps at a time, and yields the state after each turn until all rows are done.

        Use a yielded state before you resume the generator: resuming donates it.  `send` a bool [B]
        to stop rows.
        """
        within("steps_per_chunk", steps_per_chunk, 1)
        while not to_host(state.done).all():
            state = self.run(params, state, steps_per_chunk)
            stop = yield state
            if stop is not None:
                state = dataclasses.replace(state, done=stopped(state.done, stop))

    def insert(self, state: DecodeState, slot: int | Array, row: DecodeState) -> DecodeState:
        """Puts `row`, a state of one row, into `slot` of `state` (continuous batching).

        `state` is donated.

        Raises:
          ValueError: `state` and `row` differ in kinds of settings or in shapes; `row` has several
            rows; or `slot` is not a row of `state`.  A traced slot is not checked: a slot out of
            bounds inserts nothing.
        """
        check_slot(slot, len(state.tokens), len(row.tokens))

        def shape(x: DecodeState) -> tuple[object, list[tuple[int, ...]]]:
            return structure_of(x), [leaf.shape[1:] for leaf in jax.tree.leaves(x)]

        if shape(state) != shape(row):
            raise ValueError(
                "the row and the batch are of different shapes: prefill both with the same "
                "decoder, and both without processors or both with "
                "Processors.create(..., every=True) and one constraint_size"
            )
        at = slot if isinstance(slot, Array) else np.array(slot, np.int32)
        return insert(layout(state), state, at, row)

    def _draw(
        self, state: DecodeState, width: int | None = None, after: Array | None = None
    ) -> SharedDraw | IndependentDraw:
        """Returns the randomness of a step, of the kind that the rule needs.

        Args:
          state: before the step.
          width: the nodes that are judged, by default all.
          after: [B] tokens from the pending one to the node that is judged; by default it is that.
        """
        size, position = self.target.vocab_size, state.cache.length
        if after is not None:
            position = position + after
        if self.rule.shared_noise:
            sampled = (state.sampling.temperature > 0).any()
            depth = self.proposer.max_depth
            depth = depth if width is None else min(depth, width - 1)
            return SharedDraw.create(state.key, position, depth, size, sampled)
        return IndependentDraw.create(state.key, position, size, self.proposer.num_nodes)

    def _warp(self, state: DecodeState, logits: Array, path: Array | None = None) -> Array:
        """Returns the logits [B, M, V] of the sampled distribution after each `path` [B, M, D]."""
        # A draft model with its own vocabulary cannot use settings about the target's tokens.
        if state.processors is not None and logits.shape[-1] == self.target.vocab_size:
            logits = process(state, logits, path, self.logits_processor, self.capacity)
        return warp(logits, state.sampling, self.target.triton)


def _kind(_: object, state: DecodeState, steps: object, until: object = None) -> tuple[object, ...]:
    return state.tokens.shape, state.eos.shape, structure_of(state.processors)


@programs(static=2, shape=_kind, donate=(3,))
def _run(
    decoder: Decoder,
    layout: Layout,
    params: Params,
    state: DecodeState,
    max_steps: Array | np.ndarray,
    until: _Until | None = None,
) -> DecodeState:
    def goes_on(end: Array | np.ndarray, carry: _Steps) -> Array:
        steps, state = carry
        if until is not None:
            least, rows = until
            end = jnp.where((state.done & rows).any(), jnp.minimum(least, end), end)
        return (steps < end) & ~state.done.all()

    at_rest, settled = decoder.at_rest(state), decoder.settled(state)
    proposer = decoder.proposer

    def step(decoder: Decoder, carry: _Steps) -> _Steps:
        return carry[0] + 1, constrain_like(decoder.step(params, carry[1])[0], layout)

    def settles(carry: _Steps) -> Array:
        state = carry[1]
        return go_on(carry) & proposer.settled(params.proposer, state.proposer, ~state.done)

    def body(carry: _Steps) -> _Steps:
        steps, state = step(decoder, carry)
        if settled is not None:
            run = functools.partial(step, settled)
            steps, state = jax.lax.while_loop(settles, run, (steps, state))
        if at_rest is None:
            return steps, state
        rest = proposer.resting(params.proposer, state.proposer, ~state.done)
        if rest is None:
            return steps, state
        end = jnp.minimum(steps + rest, max_steps)
        return jax.lax.while_loop(
            functools.partial(goes_on, end), functools.partial(step, at_rest), (steps, state)
        )

    go_on = functools.partial(goes_on, max_steps)
    return constrain_like(jax.lax.while_loop(go_on, body, (jnp.int32(0), state))[1], layout)


def _zeros(shapes: _Made) -> _Made:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _at(x: Array, index: Array) -> Array:
    """[B, N, ...], [B] -> [B, ...]"""
    return jax.vmap(lambda row, n: row[n])(x, index)
