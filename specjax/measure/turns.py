"""Measures candidates in turns, so that a drift of the machine's speed affects all alike."""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import numpy as np
from tqdm import tqdm

from specjax._internal.jit_cache import keep_programs
from specjax.measure.meter import Meter
from specjax.parallel import leader

_BUSY = 0.1
"""The largest share of the cores that other processes may use; else a sample is dropped."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """The seconds of one call."""

    seconds: float
    compile_seconds: float = 0.0  # not part of `seconds`
    prefill: float | None = None  # the part of `seconds` before decoding began; None if unknown


class Timed(abc.ABC):
    """A candidate and its measurements.

    Attributes:
      name: for messages.
      first: seconds of the slowest first call of an item; first calls compile.
      seconds: the undisturbed samples, a list for each item.
      prefill: the part of `seconds` before decoding began; empty lists if this is unknown.
      dropped: the number of samples that other processes disturbed.
    """

    def __init__(self, name: str, items: int) -> None:
        self.name = name
        self.first = 0.0
        self.seconds: list[list[float]] = [[] for _ in range(items)]
        self.prefill: list[list[float]] = [[] for _ in range(items)]
        self.dropped = 0

    @abc.abstractmethod
    def run(self, item: int) -> Sample:
        """Works on an item, such as a prompt or a batch, until the work is finished."""

    def run_first(self) -> None:
        """Runs every item once, so that everything is compiled."""
        for item in range(len(self.seconds)):
            sample = self.run(item)
            self.first = max(self.first, sample.compile_seconds + sample.seconds)

    def measure(self, item: int) -> None:
        """Runs an item, and records the sample unless other processes disturbed it."""
        meter = Meter()
        sample = self.run(item)
        if meter.busy() > _BUSY:
            self.dropped += 1
            return
        self.seconds[item].append(sample.seconds)
        if sample.prefill is not None:
            self.prefill[item].append(sample.prefill)

    @property
    def median(self) -> float | None:
        """Returns median seconds, summed over all items; None if an item has no good sample."""
        return self._total(statistics.median)

    @property
    def decoding(self) -> float | None:
        """Returns `median` without the prefill; None if the prefill is not known for every item."""
        median = self.median
        if median is None or not all(self.prefill):
            return None
        return median - sum(map(statistics.median, self.prefill))

    @property
    def spread(self) -> float | None:
        """Returns (longest - shortest) / median."""
        high, low, middle = self._total(max), self._total(min), self.median
        return (high - low) / middle if high is not None and low is not None and middle else None

    def _total(self, of: Callable[[list[float]], float]) -> float | None:
        return sum(map(of, self.seconds)) if all(self.seconds) else None


TimedT = TypeVar("TimedT", bound=Timed)


def first_calls(
    contestants: Sequence[TimedT], until: float = math.inf, forgive: bool = False
) -> tuple[list[TimedT], list[str]]:
    """Runs every item of each candidate once, so that everything is compiled.

    Args:
      contestants: they run in this order; the others are compared with the first one.
      until: a time of `time.perf_counter`.  First calls may take two thirds of the time until then;
        candidates whose turn comes later are left out.
      forgive: leave out a candidate that fails, unless it is the first one, and go on.

    Returns:
      The candidates that ran, and for each one left out a line with the reason.
    """
    # Contestants take turns: if their programs were dropped, each turn would compile again.
    keep_programs(None)
    ready: list[TimedT] = []
    left_out, began = [], time.perf_counter()
    for contestant in tqdm(
        contestants, "first calls", unit="contestant", disable=_quiet(), file=sys.stderr
    ):
        if ready and time.perf_counter() - began > (until - began) * 2 / 3:
            left_out.append(f"{contestant.name}: no time")
            continue
        try:
            contestant.run_first()
        except Exception as error:
            if not ready or not forgive:
                raise
            traceback.print_exc()
            reason = str(error).strip().splitlines()[:1]
            left_out.append(f"{contestant.name}: {type(error).__name__}: {reason}")
            continue
        ready.append(contestant)
    return ready, left_out


def take_turns(contestants: Sequence[Timed], rounds: int, until: float = math.inf) -> None:
    """Runs every item with each candidate in turn, in every round.

    After `until`, a time of `time.perf_counter`, no further round begins.  One round always runs.
    """
    items = range(len(contestants[0].seconds))
    for number in tqdm(range(rounds), "measuring", unit="round", disable=_quiet(), file=sys.stderr):
        if number and time.perf_counter() > until:
            break
        for item, contestant in itertools.product(items, contestants):
            contestant.measure(item)


def medians(samples: Sequence[Sequence[float]]) -> np.ndarray:
    """Returns the median of each item's samples.

    Raises:
      ValueError: an item has no sample, because other processes disturbed all of them.
    """
    lost = sum(not len(each) for each in samples)
    if lost:
        raise ValueError(
            f"no sample of {lost} of {len(samples)} items is left: "
            "other processes disturbed all of them; measure on an idle machine, or in more rounds"
        )
    return np.array([statistics.median(each) for each in samples])


def median_seconds(call: Callable[[], object], rounds: int) -> float:
    """Returns the median seconds of a call, measured after a first call that compiles."""
    jax.block_until_ready(call())
    samples = []
    for _ in range(rounds):
        started = time.perf_counter()
        jax.block_until_ready(call())
        samples.append(time.perf_counter() - started)
    return statistics.median(samples)


def _quiet() -> bool | None:
    """Returns `disable` for tqdm: only the first process shows bars, at a terminal."""
    return None if leader() else True
