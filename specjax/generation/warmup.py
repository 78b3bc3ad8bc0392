"""`warm_up`: puts the weights of a prepared request on their devices, and compiles what decodes it.

The first request of a kind reads its prompts twice: here, for a few steps that compile everything,
and again in `decode`.  If its drafter is adaptive, what its options cost is measured from a copy of
the state that was read here, or from other readings where there is no memory for a copy.

A drafter that is `on_demand` begins with few options (`AdaptiveDrafter.begun`).  All of them are
compiled by the call before which they would have saved as much time as that takes (`Demand`).
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
from specjax.decoding import Decoder, Guided
from specjax.drafters import AdaptiveDrafter
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
    to_host,
)
from specjax.proposers import Adaptive
from specjax.sampling import folded_keys
from specjax.tuning import (
    Demand,
    Learned,
    Weights,
    about,
    add_demand,
    judged_by_part,
    keep_costs,
    keep_demand,
    read_costs,
    read_demand,
    read_plan,
    seconds_by_context,
    weights_of,
)
from specjax.types import ABSENT, DecodeState, Params

WARM_STEPS = 16
"""The number of steps that `warm_up` runs.  Several are needed because on a CPU a matrix product is
slow the first time, and prompt lookup runs the wide pass only when it finds a match."""

_LEAST_BUDGET, _SHARE = 2.0, 0.05
"""The seconds that the first request of a kind may measure what its options cost: at least, and as
a share of the time for which it compiled."""

_FIRST_BUDGET = 1.0
"""The least seconds where there are few options.  Samples of a step may differ by 40 % on a busy
machine, and a command keeps the costs for a day."""

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
    whole, prepared = prepared, _with_options(prepared)
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
            learned = _compile(ready, started, whole)
    _compiled.get(kind, lambda: learned)
    if learned is not None and prepared is whole:
        _take_over(learned, whole)
    return _with_learned(ready, learned, time.perf_counter() - started)


def _few(prepared: Prepared) -> Prepared | None:
    """Returns a request with the options of the first calls; None if it has all of them at once."""
    drafter = prepared.drafter
    if not prepared.learns or not isinstance(drafter, AdaptiveDrafter):
        return None
    begun = drafter.begun(len(prepared.lengths))
    if begun is None or prepared.overlapped is not None or not prepared.decoder.rule.fixes_text():
        return None
    decoder = dataclasses.replace(prepared.decoder, proposer=begun.proposer)
    return dataclasses.replace(prepared, decoder=decoder, drafter=begun)


def _with_options(prepared: Prepared) -> Prepared:
    """Returns the request with all of its options, or with those of the first calls."""
    few = _few(prepared)
    if few is None or _kind(prepared) in _compiled:
        return prepared
    kind = _kind(few)
    if kind in _compiled:
        learned = _compiled.get(kind, lambda: None)
    else:
        known = _known(prepared)
        if read_plan(about(*known)) is not None or read_costs(*known) is not None:
            return prepared
        demand = read_demand(*_known(few))
        return prepared if demand is not None and demand.pays else few
    demand = None if learned is None else learned.demand
    return prepared if demand is not None and demand.pays else few


def _take_over(learned: Learned, whole: Prepared) -> None:
    """Takes what the first calls have learned of acceptance."""
    few = _few(whole)
    kind = None if few is None else _kind(few)
    before = _compiled.get(kind, lambda: None) if kind in _compiled else None
    if before is not None and not learned.judged.any():
        learned.prior, learned.judged = before.prior.copy(), before.judged.copy()


def _known(prepared: Prepared) -> tuple[Decoder, Weights, int, bool, int]:
    """Returns all that the costs depend on, beside the machine."""
    weights, rows = weights_of(prepared.target, prepared.drafter), len(prepared.lengths)
    return prepared.decoder, weights, rows, prepared.samples, prepared.context


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
        weights_of(prepared.target, prepared.drafter) if prepared.learns else (),
    )  # fmt: skip


def _compile(ready: Ready, started: float, whole: Prepared) -> Learned | None:
    """Compiles by a prefill and a few steps, and measures the costs of the drafter's options.

    `whole` is the request with all of its options.
    """
    prepared = ready.prepared
    learned, known = None, ()
    if prepared.learns:
        known = _known(prepared)
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
        least = _LEAST_BUDGET if prepared is whole else _FIRST_BUDGET
        budget = max(least, _SHARE * (measuring - started))
        costs, longer = seconds_by_context(
            prepared.decoder, ready.params, restart, budget,
            int(prepared.lengths.max()), prepared.context,
        )  # fmt: skip
        prior = np.array(ready.params.proposer.prior)
        learned = Learned(costs.seconds, prior, 0.0, longer=longer, awake=costs.awake)
        learned.spent = time.perf_counter() - measuring
        keep_costs(learned, *known)
    if learned is not None and prepared is not whole:
        learned.demand = read_demand(*known)
        if learned.demand is None:
            few, every = (one.decoder.proposer.narrower for one in (prepared, whole))
            # Steps that draft without a choice (`Settled`) have a program of their own.
            more = len(every) + 1 + whole.decoder.proposer.settles
            took = (time.perf_counter() - started) * more / (len(few) + 1)
            depths = (*(width - 1 for width in every[1:]), whole.decoder.proposer.max_depth)
            learned.demand = Demand(depths, took)
            keep_demand(learned.demand, *known)
    return learned


def count(ready: Ready, state: DecodeState, seconds: float) -> None:
    """Takes what a finished request says of acceptance, and of options that are not compiled."""
    learned, prepared = ready.learned, ready.prepared
    if learned is None:
        return
    if learned.demand is not None:
        proposer, stats = prepared.decoder.proposer, to_host(state.stats)
        assert isinstance(proposer, Adaptive)
        sums = judged_by_part(state.proposer).items()
        judged = {part: (float(of), float(accepted)) for part, (of, accepted) in sums}
        drafting, passes = stats.drafting.sum(), stats.target_passes.sum()
        before = learned.demand.lost
        learned.demand.count(
            proposer.options, learned.seconds, judged, learned.prior,
            float(drafting) / max(float(passes), 1.0), seconds,
        )  # fmt: skip
        rest = state.proposer.rest
        if rest is not None:
            saved = float(to_host(rest.saved).mean())
            learned.demand.count_rests(float(learned.seconds[0]), saved, seconds)
        add_demand(learned.demand, learned.demand.lost - before, *_known(prepared))
    learned.learn(state)


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
