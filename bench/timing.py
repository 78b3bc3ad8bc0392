"""Contestants in turn, so that a drift of the machine meets all alike; samples that others disturbed are dropped."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time

import numpy as np
from tqdm import tqdm

from bench.contestants import Contestant
from specjax.commands.bench import Meter

_BUSY = 0.1


@dataclasses.dataclass
class Timed:
    """What was measured of one contestant."""

    contestant: Contestant
    first: float  # seconds of the first call, which compiles
    seconds: list[float]  # of the clean samples
    dropped: int
    tokens: np.ndarray  # [B, new] of the last run
    facts: dict

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def spread(self) -> float | None:
        """(longest - shortest) / median."""
        return (max(self.seconds) - min(self.seconds)) / statistics.median(self.seconds) if self.seconds else None


def alternate(contestants: list[Contestant], prompts: np.ndarray, new: int, rounds: int) -> list[Timed]:
    """Each contestant once to warm up, then all of them `rounds` times in turn."""
    found = []
    for contestant in contestants:
        started = time.perf_counter()
        tokens = contestant.run(prompts, new)
        found.append(Timed(contestant, time.perf_counter() - started, [], 0, tokens, {}))
    turns = [timed for _ in range(rounds) for timed in found]
    for timed in tqdm(turns, desc="measuring", unit="run", disable=None, file=sys.stderr):
        meter, started = Meter(), time.perf_counter()
        timed.tokens = timed.contestant.run(prompts, new)
        seconds = time.perf_counter() - started
        timed.facts = dict(timed.contestant.facts)
        if meter.busy() > _BUSY:
            timed.dropped += 1
        else:
            timed.seconds.append(seconds)
    return found
