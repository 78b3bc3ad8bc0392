"""Contestants in turn, so that a drift of the machine meets all alike; samples that others disturbed are dropped."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence

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
    seconds: list[list[float]]  # of the clean samples, a list a batch of prompts
    dropped: int
    tokens: list[np.ndarray]  # [B, new] a batch
    counts: dict[str, int]  # over all batches; those that the contestant tells

    @property
    def median(self) -> float | None:
        """Of all batches together; None where one of them has no clean sample."""
        return self._total(statistics.median)

    @property
    def spread(self) -> float | None:
        """(longest - shortest) / median."""
        high, low, middle = self._total(max), self._total(min), self.median
        return (high - low) / middle if high is not None and low is not None and middle else None

    @property
    def alpha(self) -> float | None:
        """Accepted guesses of those that the target judged."""
        return self.counts["accepted"] / self.counts["tested"] if self.counts.get("tested") else None

    @property
    def tau(self) -> float | None:
        """New tokens a pass of the target."""
        return self.counts["emitted"] / self.counts["passes"] if self.counts else None

    def _total(self, of: Callable[[list[float]], float]) -> float | None:
        return sum(map(of, self.seconds)) if all(self.seconds) else None


def alternate(contestants: list[Contestant], prompts: Sequence[np.ndarray], new: int, rounds: int) -> list[Timed]:
    """Each contestant on each batch once to warm up, then all of them `rounds` times in turn."""
    found = []
    for contestant in contestants:
        started = time.perf_counter()
        tokens, counts = [contestant.run(prompts[0], new)], dict(contestant.counts)
        first = time.perf_counter() - started
        for batch in prompts[1:]:
            tokens.append(contestant.run(batch, new))
            counts = {name: count + contestant.counts[name] for name, count in counts.items()}
        found.append(Timed(contestant, first, [[] for _ in prompts], 0, tokens, counts))
    turns = [(number, timed) for _ in range(rounds) for number in range(len(prompts)) for timed in found]
    for number, timed in tqdm(turns, desc="measuring", unit="run", disable=None, file=sys.stderr):
        meter, started = Meter(), time.perf_counter()
        timed.contestant.run(prompts[number], new)
        seconds = time.perf_counter() - started
        if meter.busy() > _BUSY:
            timed.dropped += 1
        else:
            timed.seconds[number].append(seconds)
    return found
