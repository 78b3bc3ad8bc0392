"""`warm_up`: puts the weights of a prepared request on their devices, and compiles what decodes it.

The first request of a kind reads its prompts twice: here, for a few steps that compile everything,
and again in `decode`.  If its drafter is adaptive, what its options cost is measured from a copy of
the state that was read here, or from other readings where there is no memory for a copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax._internal.collecting import collecting_rarely
from specjax._internal.jit_cache import Recent, structure_of
from specjax.decoding import Guided
from specjax.generation.padding import pad_rows
from specjax.generation.prepared import Prepared
from specjax.overlap import Overlapped
from specjax.parallel import (
    constrain_like,
    device_bytes,
    devices_of,
    fits,
    layout,
    replicate,
    shard_params,
)
from specjax.sampling import folded_keys
from specjax.tuning import Learned, about, keep_costs, read_costs, read_plan, seconds_by_context
from specjax.types import ABSENT, DecodeState, Params

WARM_STEPS = 16
"""The number of steps that `warm_up` runs.  Several are needed because on a CPU a matrix product is
slow the first time, and prompt lookup runs the wide pass only when it finds a match."""

_LEAST_BUDGET, _SHARE = 2.0, 0.05
"""The seconds that the first request of a kind may measure what its options cost: at least, and as
a share of the time for which it compiled."""

_compiled: Recent[Hashable, Learned | None] = Recent()
"""The structures that were compiled, and what was learned of those that draft adaptively."""


@dataclasses.dataclass(frozen=True, eq=False)
class Ready:
    """A prepared request whose weights are on their devices."""

    prepared: Prepared
    runner: Any  # the decoder, or what has its methods for two meshes or for grammars
    params: Params  # after `warm_up` with what was learned
    learned: Learned | None = None  # of this structure, if its drafter is adaptive
    seconds: float = 0.0  # for which `warm_up` compiled and measured; 0.0 if there was no need to

    def prefill(self, endless: bool = False) -> Any:
        """Reads the prompts.  With `endless`, a row ends only where it has no more room."""
        return self.runner.prefill(self.params, **_inputs(self.prepared, endless))

    def ended(self, state: Any) -> None:
        """Takes the last state of the request; by default nobody needs it."""


def place(prepared: Prepared, together: bool = False) -> Ready:
    """Moves the weights, and makes those of the proposer, which may compile.

    With `together`, the draft takes turns with the target even if it has its own mesh.
    """
    apart = None if together else prepared.overlapped
    if apart is not None and not apart.alone:
        weights = prepared.drafter.make(prepared.target, prepared.slots)
        return Ready(prepared, apart, apart.place(Params(prepared.target.params, weights)))
    runner, padding = prepared.decoder, prepared.padding
    if prepared.matchers is not None:
        lengths = pad_rows(prepared.lengths, padding)
        runner = Guided(runner, [*prepared.matchers, *[None] * padding], lengths)
    target, mesh = prepared.target, prepared.mesh
    if mesh is not None:
        params = shard_params(target.model, target.params, mesh)
        target = dataclasses.replace(target, params=params)
    slots = pad_rows(prepared.slots, padding)
    weights = replicate(prepared.drafter.make(target, slots), mesh)
    return Ready(prepared, runner, Params(target.params, weights))


def warm_up(prepared: Prepared) -> Ready:
    """Places the weights, and compiles unless a request of the same kind came before.

    For a drafter that is adaptive, the first request of a kind also measures what its options cost.
    """
    kind = _kind(prepared)
    if kind in _compiled:
        learned = _compiled.get(kind, lambda: None)  # used last now, as its programs are
        return _with_learned(place(prepared), learned, 0.0)
    started, learned = time.perf_counter(), None
    with collecting_rarely():
        ready = place(prepared)
        if isinstance(ready.runner, Overlapped):
            ready = _compile_apart(ready, ready.runner)
        if not isinstance(ready.runner, Overlapped):
            learned = _compile(ready, started)
    _compiled.get(kind, lambda: learned)
    return _with_learned(ready, learned, time.perf_counter() - started)


def _with_learned(ready: Ready, learned: Learned | None, seconds: float) -> Ready:
    params = ready.params if learned is None else learned.put(ready.params)
    return dataclasses.replace(ready, params=params, learned=learned, seconds=seconds)


def _kind(prepared: Prepared) -> Hashable:
    """Returns the key of the programs that a request needs."""
    inputs = (
        prepared.prompt, prepared.sampling, prepared.processors, prepared.eos,
        prepared.num_drafts, prepared.documents,
    )  # fmt: skip
    contexts = prepared.contexts if prepared.learns else ()
    shapes = tuple((x.shape, x.dtype.name) for x in jax.tree.leaves(inputs))
    # Sampling needs noise for every draft, so a step with drafts has another price.
    samples = prepared.learns and prepared.samples
    return (
        prepared.decoder, prepared.mesh, prepared.overlapped, prepared.matchers is not None,
        prepared.learns, samples, contexts, structure_of(inputs), shapes,
    )  # fmt: skip


def _compile(ready: Ready, started: float) -> Learned | None:
    """Compiles by a prefill and a few steps, and measures the costs of the drafter's options."""
    prepared = ready.prepared
    learned, known = None, ()
    if prepared.learns:
        known = prepared.decoder, len(prepared.lengths), prepared.samples, prepared.context
        learned = read_plan(about(*known)) or read_costs(*known)
    measures = prepared.learns and learned is None
    # Rows of a grammar end, so they are measured without it, from another reading of the prompts.
    endless = measures and prepared.matchers is None
    state = ready.prefill(endless)
    restart = functools.partial(ready.prefill, endless=True)
    if endless and fits(device_bytes(state, prepared.mesh), devices_of(ready.params.target)):
        at = layout(state)
        restart = functools.partial(_copied, at, _copied(at, state))
    states = ready.runner.stream(ready.params, state, steps_per_chunk=WARM_STEPS)
    state = next(states)
    with contextlib.suppress(StopIteration):
        states.send(np.ones(state.done.shape, bool))
    del state  # before there is another one
    if measures:
        measuring = time.perf_counter()
        budget = max(_LEAST_BUDGET, _SHARE * (measuring - started))
        seconds, longer = seconds_by_context(
            prepared.decoder, ready.params, restart, budget,
            int(prepared.lengths.max()), prepared.context,
        )  # fmt: skip
        prior = np.array(ready.params.proposer.prior)
        learned = Learned(seconds, prior, time.perf_counter() - measuring, longer=longer)
        keep_costs(learned, *known)
    return learned


def _compile_apart(ready: Ready, apart: Overlapped) -> Ready:
    """Compiles for two meshes, and measures whether they pay."""
    apart.compile(ready.params, ready.prefill())
    if jax.process_count() > 1:  # each process would measure other times
        return ready
    together = place(ready.prepared, together=True)
    endless = functools.partial(_inputs, ready.prepared, endless=True)
    apart.compare(ready.params, together.params, endless)
    return together if apart.alone else ready


def _inputs(prepared: Prepared, endless: bool) -> dict[str, Any]:
    """Returns the arguments of `Decoder.prefill`."""
    (seeds, rows), padding = prepared.seeds, prepared.padding
    arrays = {
        "prompt": prepared.prompt,
        "prompt_length": prepared.lengths,
        "sampling": prepared.sampling,
        "key": folded_keys(seeds, rows),
        "num_drafts": prepared.num_drafts,
        "documents": prepared.documents,
        "processors": prepared.processors,
        "eos": prepared.eos,
    }
    # A padding row has no room for new tokens, so it is done at once and is not counted.
    wanted = np.arange(len(rows) + padding) < len(rows)
    limit = pad_rows(prepared.lengths, padding) + np.int32(prepared.new) * wanted
    if endless:
        room = min(prepared.decoder.capacity, prepared.target.model.max_positions + 1)
        limit = np.where(wanted, room, limit)
        arrays["eos"] = np.full_like(prepared.eos, ABSENT)
    return {"limit": limit.astype(np.int32), **pad_rows(arrays, padding)}


@functools.partial(jax.jit, static_argnums=0)
def _copied(at: Any, state: DecodeState) -> DecodeState:
    """Returns a state in buffers of its own, laid out by `at`."""
    return constrain_like(jax.tree.map(jnp.copy, state), at)
