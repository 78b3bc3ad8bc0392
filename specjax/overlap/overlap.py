"""`Overlapped`: a decoder whose draft and target work at the same time, on two meshes.

    target's mesh   [ verify n         ][ verify n + 1     ]...
    draft's mesh    [ draft n + 1      ][ draft n + 2      ]...
                      for the likeliest outcomes of n

A step is three programs: `verify` on the target's mesh, `prepare` and `conclude` on the draft's.
The host dispatches them without waiting for their results, and JAX runs each as soon as its inputs
are there.  `conclude` needs the verdict.  If one of the proposals was prepared for it, the next
verification starts at once; otherwise `conclude` drafts anew.  In both cases the proposal is that
of the sequential loop, so the text is the same under every rule.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, TypeVarTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from specjax._internal.checks import typed, within
from specjax._internal.jit_cache import Recent
from specjax.overlap.links import is_here, send
from specjax.overlap.outcomes import Ahead, Fan, Foresight, hit_rate
from specjax.overlap.pace import Pace
from specjax.overlap.sides import DecoderLike, check_separable, draft_half, target_half
from specjax.overlap.steps import (
    RANKS,
    Drafting,
    Layout,
    OverlapState,
    begin,
    conclude,
    prepare,
    proposal_shapes,
    put_row,
    stopped,
    verify,
)
from specjax.parallel import described, is_split, layout, mesh_of, replicate, shard_params, to_host
from specjax.types import DecodeState, Params, Verdict

_FOREVER = 2**31 - 1
_T = TypeVar("_T")
_InputsT = TypeVarTuple("_InputsT")

_TURNS, _COUNTED, _STEPS = 6, 3, 8  # turns of `compare`, those that count, and steps of a turn


class Overlapped:
    """Decodes as `decoder` does, with the draft and the target on meshes of their own.

    It has the decoder's `prefill`, `run`, `stream` and `insert`, with an `OverlapState`.  Tokens
    are those of the decoder for the same keys, always.  Each row has its own outcomes: a row whose
    verdict was not foreseen drafts anew, while the others keep their proposals; the target waits
    for all of them.

    Whether drafting ahead pays is measured while decoding.  Where it does not, the draft works in
    turn with the target, as in the sequential loop.  If both meshes are the same single device, the
    decoder itself is used, with a warning.
    """

    def __init__(
        self,
        decoder: DecoderLike,
        draft_mesh: Mesh,
        target_mesh: Mesh,
        *,
        outcomes: int = 4,
        coupled: bool = True,
        measures: bool = True,
    ) -> None:
        """Sets up both halves; nothing is compiled or moved yet.

        Args:
          decoder: a `specjax.Decoder` whose proposer is a chain or a tree over a draft model.
          draft_mesh, target_mesh: from `make_mesh`, with no device in common.
          outcomes: the most outcomes of a verification that a row drafts for at a time.
          coupled: guess the token after a node with the noise that it will be drawn with.
          measures: choose by measured times between drafting for `outcomes`, for one, and in turn;
            False always drafts for `outcomes`, and so does a draft in several processes.

        Raises:
          ValueError: meshes that share devices, or one without devices; a proposer that cannot be
            separated from its target; or another argument that cannot be used.
        """
        typed("a specjax.Decoder", DecoderLike, decoder=decoder)
        check_meshes(draft_mesh, target_mesh)
        within("outcomes", outcomes, 1)
        self.decoder = decoder
        self.draft_mesh, self.target_mesh = draft_mesh, target_mesh
        self.alone = _same_device(draft_mesh, target_mesh)
        if self.alone:
            device = draft_mesh.devices.flat[0]
            warnings.warn(
                f"draft and target share the only device, {device}: they take turns, as without "
                "a mesh for the draft",
                stacklevel=2,
            )
            return
        check_separable(decoder.proposer)
        drafting, verifying = _processes(draft_mesh), _processes(target_mesh)
        self._apart, self._several = drafting != verifying, len(drafting | verifying) > 1
        if self._apart and decoder.num_logprobs is not None:
            raise ValueError(
                f"num_logprobs={decoder.num_logprobs} is not recorded where draft and target are "
                "in several processes: leave it out, or use meshes of one process"
            )
        self._coupled = coupled
        self._halves = draft_half(decoder), target_half(decoder)
        most = min(outcomes, RANKS * decoder.proposer.num_nodes)
        fans = [Fan(most, RANKS, coupled)]
        # Processes that draft together must not choose by what each of them sees.
        self._agrees = len(drafting) > 1
        measures &= not self._agrees
        if measures and most > 1:
            fans.append(Fan(1, RANKS, coupled))
        self._ways: list[Fan | None] = [*fans, *[None] * measures]
        self._thread = ThreadPoolExecutor(1, "specjax-verify")
        self.pace = Pace(len(self._ways))

    def place(self, params: Params) -> Params:
        """Puts `params` onto the two meshes, each half in the processes that need it.

        The target's parameters are split over its mesh by `shard_params`.  The proposer's stay as
        they are if they are on the draft's mesh, and else are replicated over its devices.
        """
        if self.alone:
            return params
        draft = replicate(params.proposer, self.draft_mesh) if is_here(self.draft_mesh) else None
        target = None
        if is_here(self.target_mesh):
            target = shard_params(self.decoder.target, params.target, self.target_mesh)
        return Params(target, draft)

    def prefill(
        self,
        params: Params,
        prompt: Array | np.ndarray,
        prompt_length: Array | np.ndarray,
        **settings: Any,
    ) -> Any:
        """Reads the prompts on both meshes at once, and drafts.

        Args:
          params: from `place`.
          prompt, prompt_length, **settings: as for `Decoder.prefill`.

        Raises:
          ValueError: as `Decoder.prefill`, for either half.
        """
        if self.alone:
            return self.decoder.prefill(params, prompt, prompt_length, **settings)
        draft, target = self._halves
        verifying = drafting = None
        if is_here(self.target_mesh):
            verifying = target.prefill(Params(params.target), prompt, prompt_length, **settings)
        if is_here(self.draft_mesh):
            # The first parameters only say where the state is to lie.
            own = Params(params.proposer, params.proposer)
            state = draft.prefill(own, prompt, prompt_length, **settings)
            at = self._coupled, self._at(params)[0]
            drafting = begin(draft, at, layout(state), own, state)
        return OverlapState(verifying, drafting)

    def run(self, params: Params, state: Any, max_steps: int = _FOREVER) -> Any:
        """Runs steps until every row is done, or `max_steps` times.

        In each step the host waits for the end of the last one, while both meshes already work on
        the next, and reads only whether the rows are done.  The state is donated.
        """
        if self.alone:
            return self.decoder.run(params, state, max_steps)
        layouts = layout(state.target), layout(state.draft)
        way, before, last = -1, -1, 0.0
        for _ in range(int(max_steps)):
            half = state.target if state.draft is None else state.draft.state
            done = half.done | False  # a copy, since the verification reuses the buffer
            verifying, following = self._start(params, state, layouts[0]), self.pace.next()
            # The draft gets its work before the host waits, or it would stand still meanwhile.  If
            # there is nothing to wait for, the host looks first: nothing is drafted after the end.
            early = self._agrees or not done.is_ready()
            ahead = self._ahead(params, state, following) if early else None
            finished, now = bool(to_host(done).all()), time.perf_counter()
            if before == way == following:
                self.pace.record(way, now - last)
            if finished:
                return OverlapState(verifying()[0], state.draft)
            if not early:
                ahead = self._ahead(params, state, following)
            before, way, last = way, following, now
            state = self._finish(params, state, layouts[1], verifying, ahead)
        return state

    def stream(
        self, params: Params, state: Any, steps_per_chunk: int = 8
    ) -> Generator[Any, Array | np.ndarray | None, None]:
        """Yields as `Decoder.stream`."""
        if self.alone:
            yield from self.decoder.stream(params, state, steps_per_chunk)
            return
        within("steps_per_chunk", steps_per_chunk, 1)
        while not to_host(state.done).all():
            state = self.run(params, state, steps_per_chunk)
            stop = yield state
            if stop is not None:
                state = stopped(state, jnp.asarray(stop))

    def insert(self, state: Any, slot: int | Array, row: Any) -> Any:
        """Inserts a row as `Decoder.insert`; `state` is donated."""
        if self.alone:
            return self.decoder.insert(state, slot, row)
        (drafts, verifies), target, draft = self._halves, state.target, state.draft
        if target is not None:
            target = verifies.insert(target, slot, row.target)
        if draft is not None:
            inner = drafts.insert(draft.state, slot, row.draft.state)
            rest = draft.proposal, draft.foresight
            new = row.draft.proposal, row.draft.foresight
            rest = put_row(layout(rest), rest, jnp.asarray(slot), new)
            draft = Drafting(inner, *rest)
        return OverlapState(target, draft)

    def compile(self, params: Params, state: OverlapState) -> None:
        """Compiles the programs of every option, by one step each; `state` is donated."""
        layouts = layout(state.target), layout(state.draft)
        for way in range(len(self._ways)):
            verifying = self._start(params, state, layouts[0])
            ahead = self._ahead(params, state, way)
            state = self._finish(params, state, layouts[1], verifying, ahead)
        jax.block_until_ready(state)
        self.foresight(state)  # other processes may still be compiling

    def compare(
        self, params: Params, together: Params, inputs: Callable[[], dict[str, Any]]
    ) -> None:
        """Uses the decoder itself from now on if its steps are faster than those on two meshes.

        Small models lose more by dispatching three programs a step than they gain.

        Args:
          params: from `place`.
          together: the same for the decoder.
          inputs: makes the arguments of `prefill`; the rows must not end soon.
        """
        runs = ((self, params), (self.decoder, together))
        seconds: list[list[float]] = [[], []]
        for turn in range(_TURNS):
            for which, (runner, own) in enumerate(runs):
                state = jax.block_until_ready(runner.prefill(own, **inputs()))
                started = time.perf_counter()
                jax.block_until_ready(runner.run(own, state, _STEPS))
                if turn >= _TURNS - _COUNTED:  # the first turns try every way to draft
                    seconds[which].append(time.perf_counter() - started)
        self.alone = min(seconds[1]) < min(seconds[0])

    def hit_rates(self, state: OverlapState) -> tuple[float | None, float | None]:
        """Returns the share of steps with a ready proposal, and the expected share.

        Steps in which the draft worked in turn are not counted; None if it always did.  All
        processes must call.
        """
        return hit_rate(self.foresight(state))

    def foresight(self, state: OverlapState) -> Foresight:
        """Returns the counts of predicted outcomes, in every process; all processes must call."""
        rows, nodes = len(state.seen.tokens), self.decoder.proposer.num_nodes
        counts = None if state.draft is None else state.draft.foresight
        if self._apart:
            shapes = jax.eval_shape(lambda: Foresight.create(rows, nodes, RANKS))
            sent = send(counts, shapes, self.draft_mesh, self.target_mesh)
            counts = sent if counts is None else counts
        assert counts is not None
        return to_host(counts)

    def _at(self, params: Params) -> tuple[Mesh, bool]:
        # The mesh of the weights may have an axis `kv_copies`, which `draft_mesh` does not have.
        return mesh_of(params.proposer) or self.draft_mesh, is_split(params.proposer)

    def _beside(self, program: Callable[[*_InputsT], _T], *inputs: *_InputsT) -> Callable[[], _T]:
        """Dispatches a program; returns a function that waits for the dispatch.

        XLA:CPU runs some programs in the thread that dispatches them: small ones, and those that
        call Python.  So on CPUs of one process another thread dispatches.
        """
        if self._several or self.target_mesh.devices.flat[0].platform != "cpu":
            made = program(*inputs)
            return lambda: made
        return self._thread.submit(program, *inputs).result

    def _start(
        self, params: Params, state: OverlapState, layout: Layout
    ) -> Callable[[], tuple[DecodeState | None, Verdict | None]]:
        """Sends the proposal, and dispatches its verification; the result waits for it."""
        draft, target = state.draft, state.target
        proposal = send(
            None if draft is None else draft.proposal,
            proposal_shapes(self.decoder, len(state.seen.tokens)),
            self.draft_mesh,
            self.target_mesh,
        )
        if target is None:
            return lambda: (None, None)
        assert proposal is not None  # it was sent here
        own = Params(params.target)
        return self._beside(verify, self._halves[1], layout, own, target, proposal)

    def _ahead(self, params: Params, state: OverlapState, way: int) -> Ahead | None:
        """Dispatches the drafts for the likeliest outcomes; None if this option has none."""
        draft, fan = state.draft, self._ways[way]
        if draft is None or fan is None:
            return None
        own = Params(None, params.proposer)
        return prepare(self._halves[0], (fan, *self._at(params)), own, draft)

    def _finish(
        self,
        params: Params,
        state: OverlapState,
        layout: Layout,
        verifying: Callable[[], tuple[DecodeState | None, Verdict | None]],
        ahead: Ahead | None,
    ) -> OverlapState:
        """Sends the verdict, and takes or makes the next proposal."""
        draft, drafts, own = state.draft, self._halves[0], Params(None, params.proposer)
        target, verdict = verifying()
        one: Any = jax.ShapeDtypeStruct((len(state.seen.tokens),), jnp.int32)
        verdict = send(verdict, Verdict(one, one), self.target_mesh, self.draft_mesh)
        if draft is not None:
            assert verdict is not None  # it was sent here
            draft = conclude(drafts, layout, own, draft, verdict, ahead)
        return OverlapState(target, draft)


def check_meshes(draft_mesh: Mesh, target_mesh: Mesh) -> None:
    """Raises ValueError if two meshes cannot be those of a draft and of its target."""
    meshes = {"draft_mesh": draft_mesh, "target_mesh": target_mesh}
    for name, mesh in meshes.items():
        typed("what specjax.make_mesh returns", Mesh, **{name: mesh})
        if mesh.size == 0:
            raise ValueError(f"{name} has no devices; pass specjax.make_mesh(devices=[...])")
    shared = sorted(
        {d.id for d in draft_mesh.devices.flat} & {d.id for d in target_mesh.devices.flat}
    )
    if shared and not _same_device(draft_mesh, target_mesh):
        raise ValueError(
            f"the draft's {described(draft_mesh)[4:]} and the target's "
            f"{described(target_mesh)[4:]} share {', '.join(map(str, shared))}: each device can "
            "work for one of them"
        )


def _same_device(draft_mesh: Mesh, target_mesh: Mesh) -> bool:
    """Returns whether both meshes are the only device that there is."""
    return jax.device_count() == 1 and draft_mesh.size == target_mesh.size == 1


def _processes(mesh: Mesh) -> set[int]:
    return {device.process_index for device in mesh.devices.flat}


_kept: Recent[tuple[DecoderLike, Mesh, Mesh], Overlapped] = Recent()


def overlapped(decoder: DecoderLike, draft_mesh: Mesh, target_mesh: Mesh) -> Overlapped:
    """Returns the `Overlapped` that calls with equal arguments share, with its measured times."""
    key = decoder, draft_mesh, target_mesh
    return _kept.get(key, lambda: Overlapped(decoder, draft_mesh, target_mesh))
