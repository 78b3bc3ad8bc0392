"""Measures the seconds of a step with each option of `Adaptive`, in the program that decodes."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from specjax._internal.held_numbers import on_device
from specjax.decoding import Decoder
from specjax.parallel import to_host
from specjax.proposers import PAUSE, RESTS, Adaptive, AdaptiveParams, AdaptiveState
from specjax.tuning.demand import Demand, cost_of_choosing
from specjax.types import DecodeState, Params

_SHORT, _LONG = 4, 20  # steps of the two runs whose difference is timed
_SLOW = 0.02  # seconds of a step above which the cost of a call does not matter
_ROUNDS = 7

_AGREED, _FEW_ROUNDS = 0.05, 3
"""After so few rounds the samples of each option suffice, if they differ by this share at most."""

_EARLIER = 40
"""The drafts that all earlier texts count in the prior of a text.  After this many drafts the prior
is trusted: a proposer that did not pay in earlier texts is first tried after `_TRUSTED` steps.
"""

_TRUSTED = 64

_DIGITS = 2
"""Of figures that change a little with each call: equal ones are put onto the device once."""


@dataclasses.dataclass
class Learned:
    """Statistics of finished calls, with which a later call of the same structure starts."""

    seconds: np.ndarray  # [O] of a step with each of `Adaptive.options`
    prior: np.ndarray  # [2] acceptance rates of lookup and drafter
    spent: float  # seconds of the measurement
    # [2] drafts of each that were judged so far
    judged: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(2))
    longer: np.ndarray | None = None  # [C, O] seconds by context; None: `seconds` in each of them
    trees: tuple[
        np.ndarray, ...
    ] = ()  # what trees and chains of each size gave, if it drafts trees
    saved: float = 1.0  # what drafts saved a step, in steps of plain decoding
    awake: float = 0.0  # what choosing costs in a step, in the same unit
    demand: Demand | None = None  # for options that are not compiled; None: all of them are

    @property
    def pause(self) -> np.ndarray:
        """The pauses [2] of `AdaptiveParams.pause`, in steps."""
        return np.where(self.judged >= _EARLIER, _TRUSTED, PAUSE)

    def put(self, params: Params) -> Params:
        """Returns the parameters with these figures; another figure does not recompile."""
        own: AdaptiveParams = params.proposer
        own = dataclasses.replace(
            own,
            seconds=_like(own.seconds, self._rows(own)),
            prior=_like(own.prior, self.prior.round(_DIGITS)),
            pause=_like(own.pause, self.pause),
        )
        if own.saved is not None and own.awake is not None:
            saved, awake = (np.array(number).round(_DIGITS) for number in (self.saved, self.awake))
            own = dataclasses.replace(
                own, saved=_like(own.saved, saved), awake=_like(own.awake, awake)
            )
        if self.trees and own.trees is not None and own.chains is not None:
            trees, chains = self.trees
            own = dataclasses.replace(
                own, trees=_like(own.trees, trees), chains=_like(own.chains, chains)
            )
        return dataclasses.replace(params, proposer=own)

    def _rows(self, own: AdaptiveParams) -> np.ndarray:
        """Returns the seconds in the shape of `AdaptiveParams.seconds`."""
        if own.contexts is None:
            return self.seconds
        known = self.seconds if self.longer is None else self.longer
        return np.broadcast_to(known, own.seconds.shape)

    def learn(self, state: DecodeState) -> None:
        """Takes the acceptance rates of a finished text into `prior`, and what its trees gave."""
        own: AdaptiveState = state.proposer
        if own.trees is not None and own.chains is not None:
            self.trees = to_host(own.trees).known(), to_host(own.chains).known()
        if own.rest is not None:
            self.saved = float(to_host(own.rest.saved).mean())
        for part, (judged, accepted) in judged_by_part(own).items():
            self.learn_rate(part, judged, accepted)

    def learn_rate(self, part: int, judged: float, accepted: float) -> None:
        """Takes the drafts of all rows into the prior of a proposer."""
        self.prior[part] = (accepted + _EARLIER * self.prior[part]) / (judged + _EARLIER)
        self.judged[part] += judged


def judged_by_part(state: AdaptiveState) -> dict[int, np.ndarray]:
    """Returns [2], the judged and the accepted drafts of all rows, of the lookup (0) and of the
    drafter (1).

    The host adds them up: on a device each operation would be a program of its own.
    """
    slow = to_host(state.rates.recent)[..., -1, :].sum(0)
    return {part: slow[at] for at, part in enumerate(state.parts)}


def _like(old: jax.Array, new: np.ndarray) -> jax.Array:
    # An array that was put onto the one device by name would compile everything again.
    made = on_device(np.asarray(new, old.dtype))
    return made if len(old.sharding.device_set) == 1 else jax.device_put(made, old.sharding)


class Costs(NamedTuple):
    """What was measured of the options."""

    seconds: np.ndarray  # [O] of a step with each option
    awake: float  # what choosing takes, in steps of plain decoding; 0 where it never rests


class OptionClock:
    """Times steps that are forced to take one option, in the program that decodes."""

    def __init__(
        self, decoder: Decoder, params: Params, prefill: Callable[[], DecodeState]
    ) -> None:
        """Reads the prompt.

        Args:
          decoder: one of an `Adaptive` proposer.
          params: its parameters.
          prefill: makes a state whose rows have space for some steps.
        """
        assert isinstance(decoder.proposer, Adaptive)
        proposer = decoder.proposer
        self.options = proposer.options
        self.rests = proposer.rests
        self.plain = RESTS if self.rests else 0  # what most steps without drafts are
        # [O] Options of the lookup, which finds drafts in some steps only.
        self.sometimes = np.array([name == "lookup" for name, _ in self.options])
        self._decoder, self._params, self._prefill = decoder, params, prefill
        self._state = prefill()

    def restart(self) -> None:
        """Go on from the prompt: steps in longer texts take longer."""
        del self._state  # before there is another one
        self._state = self._prefill()

    def sample(self, option: int) -> float:
        """Returns the seconds of a step with an option, or with `RESTS` of one at rest.

        A call has a cost before its first step, and its first step takes longer, since the
        processor's caches hold other data.  So the time of a short run is subtracted from that of a
        longer one, unless a step takes so long that this does not matter.
        """
        own: AdaptiveParams = self._params.proposer
        own = dataclasses.replace(own, forced=_like(own.forced, np.asarray(option)))
        forced = dataclasses.replace(self._params, proposer=own)
        each, steps = 0.0, 0
        for _ in range(2):
            each, steps = self._run(forced, _SHORT)  # warms up the caches for this width
            if steps == _SHORT and each > _SLOW * steps:
                each, steps = self._run(forced, _SHORT)
                if steps:
                    return each / steps
            short, few = self._run(forced, _SHORT)
            long, many = self._run(forced, _LONG)
            if many > few:
                return max(long - short, 1e-9) / (many - few)
            self.restart()  # the rows were full
        # There is room for very few steps.
        none, _ = self._run(forced, 0)
        return max(each - none, 1e-9) / max(steps, 1)

    def _run(self, params: Params, most: int) -> tuple[float, int]:
        """Returns the seconds of at most this many steps, and their number."""
        before = int(np.max(to_host(self._state.stats.target_passes)))
        started = time.perf_counter()
        self._state = jax.block_until_ready(self._decoder.run(params, self._state, most))
        seconds = time.perf_counter() - started
        return seconds, int(np.max(to_host(self._state.stats.target_passes))) - before


def option_costs(
    decoder: Decoder, params: Params, prefill: Callable[[], DecodeState], budget: float
) -> Costs:
    """Measures the median seconds of a step with each option, and of choosing.

    Drafts of a drafter are compared with steps at rest, which spend no time on a choice.  Most
    steps with its deepest drafts spend none either, since they keep an earlier choice.  The lookup
    finds drafts in some steps only, and the others choose as well.  So the time of choosing is
    subtracted from the seconds of its options, and `Rest` compares it with what drafts save.

    An option for which the budget has no time left is interpolated between the measured options of
    its proposer; plain decoding and the deepest drafts of each proposer are always measured.

    Args:
      decoder: one of an `Adaptive` proposer.
      params: its parameters.
      prefill: makes a state whose rows have space for some steps.
      budget: seconds.
    """
    began, clock = time.perf_counter(), OptionClock(decoder, params, prefill)
    depths = [depth for _, depth in clock.options]
    deepest = [index for index, depth in enumerate(depths) if depth == max(depths)]
    order = [*deepest, *(i for i in range(1, len(depths)) if i not in deepest)]
    found: list[list[float]] = [[] for _ in depths]
    awake: list[float] = []
    for turn in range(_ROUNDS):
        if turn and time.perf_counter() - began > budget:
            break
        found[0].append(clock.sample(clock.plain))
        if clock.rests and found[0][-1] <= _SLOW:
            awake.append(clock.sample(0))
        for index in order:
            late = time.perf_counter() - began > budget
            if not late or (not turn and index in deepest):
                found[index].append(clock.sample(index))
        if turn + 1 >= _FEW_ROUNDS and all(map(_agree, found)):
            break
    return costs_of(clock, found, awake)


def costs_of(
    clock: OptionClock, samples: Sequence[Sequence[float]], awake: Sequence[float]
) -> Costs:
    """Returns the costs by the medians of samples.

    Args:
      clock: which took the samples.
      samples: the seconds of steps with each option, of the first with `OptionClock.plain`.
      awake: the seconds of steps that choose and have no drafts.  The time of choosing is 0 if
        there are none, if it cannot rest, or if a step takes so long that this does not matter.
    """
    plain = statistics.median(samples[0])
    measured = bool(awake) and clock.rests and plain <= _SLOW
    choosing = max(statistics.median(awake) - plain, 0.0) if measured else 0.0
    net = [
        [max(one - choosing, 1e-9) for one in each] if sometimes else each
        for each, sometimes in zip(samples, clock.sometimes, strict=True)
    ]
    # On a busy machine the difference of two times may be anything, and at 0 it would never rest.
    share = float(np.clip(choosing / plain, cost_of_choosing(plain), 0.5)) if measured else 0.0
    return Costs(seconds_of(clock.options, net), share)


def seconds_by_context(
    decoder: Decoder,
    params: Params,
    prefill: Callable[[], DecodeState],
    budget: float,
    begins: int,
    ends: int,
) -> tuple[Costs, np.ndarray | None]:
    """Measures the costs at the beginning of a text, and from there on the seconds by context.

    A step takes longer by so much a token of the text, so what lies between the beginning and the
    end is interpolated.  At the end only the length of the caches is real, and not what they hold.

    Args:
      decoder, params, prefill: as for `option_costs`.
      budget: seconds, of both measurements together.
      begins: tokens of the longest prompt.
      ends: tokens of the longest text.

    Returns:
      The costs at the beginning, and the seconds [C, O] of each of `AdaptiveParams.contexts`, or
      None if there is one context or no room for a measurement at the end.
    """
    own: AdaptiveParams = params.proposer
    late = ends - _LONG * 2 * (decoder.proposer.max_depth + 1)
    if own.contexts is None or late - begins < ends // 2:
        return option_costs(decoder, params, prefill, budget), None
    costs = option_costs(decoder, params, prefill, budget / 2)
    first = costs.seconds
    moved = functools.partial(_lengthened, prefill, late - begins)
    last = np.maximum(option_costs(decoder, params, moved, budget / 2).seconds, first)
    places = np.minimum(to_host(own.contexts), ends)
    share = np.clip((places - begins) / (late - begins), 0.0, None)[:, None]
    rows = first + share * (last - first)
    rows[places <= max(begins, places[0])] = first
    return costs, rows


def _lengthened(prefill: Callable[[], DecodeState], more: int) -> DecodeState:
    """Returns a state whose texts seem to have so many tokens more."""

    def moved(path: Sequence[object], x: jax.Array) -> jax.Array:
        return x + np.int32(more) if getattr(path[-1], "name", None) == "length" else x

    return jax.tree_util.tree_map_with_path(moved, prefill())


def _agree(samples: Sequence[float]) -> bool:
    """Returns whether the samples of an option hardly differ."""
    few = len(samples) < _FEW_ROUNDS
    return not few and max(samples) <= (1 + _AGREED) * min(samples)


def seconds_of(
    options: Sequence[tuple[str, int]], samples: Sequence[Sequence[float]]
) -> np.ndarray:
    """Returns the median seconds [O] of each option, in order.

    An option without a sample is interpolated between the options of its proposer that have some.
    No option is cheaper than a narrower one of its proposer.
    """
    known = np.array([statistics.median(each) if len(each) else np.nan for each in samples])
    return _filled(known, [name for name, _ in options], np.array([depth for _, depth in options]))


def _filled(known: np.ndarray, names: list[str], depths: np.ndarray) -> np.ndarray:
    """Fills in an estimate for each option that is NaN; wider options are never cheaper."""
    plain = known[0] if np.isfinite(known[0]) else np.nanmin([*known, 1.0])
    filled = known.copy()
    filled[0] = plain
    for name in dict.fromkeys(names[1:]):
        mine = [index for index, other in enumerate(names) if other == name]
        at = [0, *(i for i in mine if np.isfinite(known[i]))]
        if len(at) == 1:  # nothing was measured: a tenth of a pass for each draft
            filled[mine] = plain * (1 + 0.1 * depths[mine])
        else:
            filled[mine] = np.interp(depths[mine], depths[at], filled[at])
        filled[mine] = np.maximum.accumulate(np.maximum(filled[mine], plain))
    return filled
