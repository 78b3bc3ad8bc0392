"""Seconds of a step with each option of an `Adaptive` proposer, in the program that will decode."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import Decoder
from specjax.parallel import to_host
from specjax.proposers import PAUSE, Adaptive, AdaptiveParams, Rates
from specjax.types import DecodeState, Params

_STEPS, _ROUNDS = 4, 7

_EARLIER = 40
"""All earlier texts count in the prior of a text as much as so many drafts.  After so many drafts
the prior is trusted: what did not pay in earlier texts is first tried after `_TRUSTED` steps."""

_TRUSTED = 64


@dataclasses.dataclass
class Learned:
    """What decoding has shown: a later call of the same structure starts with it."""

    seconds: np.ndarray  # [O] of a step with each of `Adaptive.options`
    prior: np.ndarray  # [2] acceptance rates of lookup and drafter
    spent: float  # seconds of the measurement
    # [2] drafts of each that were judged so far
    judged: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(2))

    @property
    def pause(self) -> np.ndarray:
        """[2] `AdaptiveParams.pause`."""
        return np.where(self.judged >= _EARLIER, _TRUSTED, PAUSE)

    def put(self, params: Params) -> Params:
        """The parameters with these figures; another figure does not recompile."""
        own: AdaptiveParams = params.proposer
        own = dataclasses.replace(
            own,
            seconds=_like(own.seconds, self.seconds),
            prior=_like(own.prior, self.prior),
            pause=_like(own.pause, self.pause),
        )
        return dataclasses.replace(params, proposer=own)

    def learn(self, state: DecodeState) -> None:
        """Take the acceptance rates of a finished text into `prior`."""
        for index, part in enumerate((state.proposer.lookup, state.proposer.drafter)):
            if part is None:
                continue
            self.learn_rates(index, part.rates)

    def learn_rates(self, part: int, rates: Rates) -> None:
        """Take the rates of all rows into the prior of a part."""
        judged, accepted = np.sum(to_host(rates.slow), axis=0)
        self.prior[part] = (accepted + _EARLIER * self.prior[part]) / (judged + _EARLIER)
        self.judged[part] += judged


def _like(old: jax.Array, new: np.ndarray) -> jax.Array:
    # An array that was put onto the one device by name would compile everything again.
    made = jnp.asarray(new, old.dtype)
    return made if len(old.sharding.device_set) == 1 else jax.device_put(made, old.sharding)


def option_seconds(
    decoder: Decoder, params: Params, prefill: Callable[[], DecodeState], budget: float
) -> np.ndarray:
    """The least seconds [O] of a step with each option; others only ever make a step longer.

    Every option is forced for a few steps.  An option for which the budget has no time left is
    taken to lie between those of its part that were measured; plain decoding and the deepest drafts
    of each part always are.

    Args:
      decoder: one of an `Adaptive` proposer.
      params: its parameters.
      prefill: makes a state whose rows have room for some steps.
      budget: seconds.
    """
    proposer = decoder.proposer
    assert isinstance(proposer, Adaptive)
    options = proposer.options
    names, depths = [name for name, _ in options], [depth for _, depth in options]
    deepest = [index for index, depth in enumerate(depths) if depth == proposer.max_depth]
    order = [0, *deepest, *(i for i in range(1, len(options)) if i not in deepest)]
    found: list[list[tuple[float, int]]] = [[] for _ in options]
    began, state = time.perf_counter(), prefill()
    starting = np.inf
    for turn in range(_ROUNDS):
        # What a call costs without any step can be more than a step of a tiny model.
        for _ in range(_ROUNDS):
            seconds, _, state = _run(decoder, params, state, 0)
            starting = min(starting, seconds)
        for index in order:
            late = time.perf_counter() - began > budget
            if late and (turn or (index and index not in deepest)):
                continue
            own = dataclasses.replace(
                params.proposer, forced=_like(params.proposer.forced, np.asarray(index))
            )
            forced = dataclasses.replace(params, proposer=own)
            for again in range(2):  # the first run of a width warms up
                seconds, steps, state = _run(decoder, forced, state, _STEPS)
                if steps < _STEPS:  # the rows are full
                    state = prefill()
                elif again or turn:
                    found[index].append((seconds, steps))
                    break
    # Every option that must be measured was, unless the capacity has room for very few steps.
    known = [
        min(max(seconds - starting, 1e-9) / steps for seconds, steps in each) if each else np.nan
        for each in found
    ]
    return _filled(np.array(known), names, np.array(depths))


def _run(
    decoder: Decoder, params: Params, state: DecodeState, most: int
) -> tuple[float, int, DecodeState]:
    """Seconds of at most so many steps, their number, and the state after them."""
    before = int(np.max(to_host(state.stats.target_passes)))
    started = time.perf_counter()
    state = jax.block_until_ready(decoder.run(params, state, most))
    seconds = time.perf_counter() - started
    steps = int(np.max(to_host(state.stats.target_passes))) - before
    return seconds, steps, state


def _filled(known: np.ndarray, names: list[str], depths: np.ndarray) -> np.ndarray:
    """With an estimate for each option that is NaN, and no option cheaper than a narrower one."""
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
