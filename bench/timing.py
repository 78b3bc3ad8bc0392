"""Contestants in turn, so that a drift of the machine meets all alike; samples that others disturbed are dropped."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence

import numpy as np
from tqdm import tqdm

from bench.contestants import Contestant
from specjax.commands import Meter

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
    prefill: list[
        list[float]
    ]  # seconds of the clean samples before decoding began; of those that tell

    @property
    def median(self) -> float | None:
        """Of all batches together; None where one of them has no clean sample."""
        return self._total(statistics.median)

    @property
    def decoding(self) -> float | None:
        """`median` without the prefill; None where the contestant does not tell it, too."""
        median = self.median
        if median is None or not all(self.prefill):
            return None
        return median - sum(map(statistics.median, self.prefill))

    @property
    def step(self) -> float | None:
        """Seconds a step of decoding, of all rows together."""
        return (
            self.decoding / self.counts["steps"]
            if self.decoding and self.counts.get("steps")
            else None
        )

    @property
    def spread(self) -> float | None:
        """(longest - shortest) / median."""
        high, low, middle = self._total(max), self._total(min), self.median
        return (high - low) / middle if high is not None and low is not None and middle else None

    @property
    def alpha(self) -> float | None:
        """Accepted guesses of those that the target judged."""
        return (
            self.counts["accepted"] / self.counts["tested"] if self.counts.get("tested") else None
        )

    @property
    def tau(self) -> float | None:
        """New tokens a pass of the target."""
        return self.counts["emitted"] / self.counts["passes"] if self.counts else None

    def _total(self, of: Callable[[list[float]], float]) -> float | None:
        return sum(map(of, self.seconds)) if all(self.seconds) else None


def alternate(
    contestants: list[Contestant],
    prompts: Sequence[np.ndarray],
    new: int,
    rounds: int,
    until: float = math.inf,
) -> tuple[list[Timed], list[str]]:
    """Each contestant on each batch once to warm up, then all of them `rounds` times in turn.

    Of the time that is left `until` then, on the clock of `time.perf_counter`, first calls may take two thirds: whoever
    comes later is left out, as is who fails, so that an unattended run loses nobody else.  One round is always run.

    Returns:
      What was measured of each, and who was left out, and why.
    """
    found, left, began = [], [], time.perf_counter()
    for contestant in tqdm(
        contestants, desc="first calls", unit="contestant", disable=None, file=sys.stderr
    ):
        name = f"{contestant.library} {contestant.name} {contestant.num_drafts}"
        started = time.perf_counter()
        if found and started - began > (until - began) * 2 / 3:
            left.append(f"{name}: no time")
            continue
        try:
            tokens, counts = [contestant.run(prompts[0], new)], dict(contestant.counts)
            first = time.perf_counter() - started
            for batch in prompts[1:]:
                tokens.append(contestant.run(batch, new))
                counts = {name: count + contestant.counts[name] for name, count in counts.items()}
        except Exception as error:
            if not found:  # the first is what all are compared with
                raise
            traceback.print_exc()
            left.append(f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[:1]}")
            continue
        found.append(
            Timed(
                contestant, first, [[] for _ in prompts], 0, tokens, counts, [[] for _ in prompts]
            )
        )
    bar = tqdm(total=rounds, desc="measuring", unit="round", disable=None, file=sys.stderr)
    for turn in range(rounds):
        if turn and time.perf_counter() > until:
            break
        for number, timed in itertools.product(range(len(prompts)), found):
            meter, started = Meter(), time.perf_counter()
            timed.contestant.run(prompts[number], new)
            seconds = time.perf_counter() - started
            if meter.busy() > _BUSY:
                timed.dropped += 1
            else:
                timed.seconds[number].append(seconds)
                timed.prefill[number] += timed.contestant.prefill[-1:]
        bar.update()
    bar.close()
    return found, left
