"""Chooses the option that takes the least time for a step, by measured times.

A step emits the same tokens with each option, so only the seconds of a step are compared.
"""

from __future__ import annotations

import math
import statistics

FIRST = 10  # steps of each way before the first choice
_TRIES, _REST, _LONGEST = 5, 64, 1024  # steps in which another way is tried, and between trials
_COST = 0.01  # the share of the time that trials may take
_KEPT = 32
_GAIN = 0.02  # another way must be faster by this share of the time
_MOST = 2.0  # times the median that a step counts at most


class Pace:
    """The seconds of a step with each option.  Options are the numbers 0 ... ways - 1."""

    def __init__(self, ways: int) -> None:
        self._seconds: list[list[float]] = [[] for _ in range(ways)]
        self._rest, self._tried = _REST, 0
        self.chosen = 0
        self._next = [way for way in range(ways) for _ in range(FIRST)]

    def next(self) -> int:
        """Returns the option of the next step."""
        if not self._next:
            self._choose()
        return self._next.pop(0)

    def record(self, way: int, seconds: float) -> None:
        """Records the seconds of a step between two steps of the same option."""
        self._seconds[way] = [*self._seconds[way], seconds][-_KEPT:]

    def seconds(self, way: int) -> float:
        """Returns the mean seconds of the last steps of an option; infinite before its first one.

        The median would be wrong: a step without a ready proposal takes longer than one with it,
        and less than twice as long.  So a step that takes still longer was delayed by something
        else.
        """
        kept = self._counted(way)
        return statistics.fmean(kept) if kept else float("inf")

    def _counted(self, way: int) -> list[float]:
        kept = self._seconds[way]
        most = _MOST * statistics.median(kept) if kept else 0.0
        return [min(seconds, most) for seconds in kept]

    def _faster(self, way: int) -> bool:
        """Returns whether an option is faster than the chosen one beyond the standard error."""
        samples = self._counted(way), self._counted(self.chosen)
        variances = (statistics.variance(x) / len(x) if len(x) > 1 else 0.0 for x in samples)
        now = self.seconds(self.chosen)
        gain = max(_GAIN * now, math.sqrt(sum(variances)))
        return self.seconds(way) < now - gain if math.isfinite(gain) else self.seconds(way) < now

    def _choose(self) -> None:
        """Chooses the fastest option.  Another one is tried later on, and less often each time."""
        ways = range(len(self._seconds))
        best = min(ways, key=self.seconds)
        if self._faster(best):
            self.chosen, self._rest = best, _REST
        else:
            self._rest = min(2 * self._rest, _LONGEST)
        others = [way for way in ways if way != self.chosen]
        if not others:
            self._next = [self.chosen] * self._rest
            return
        self._tried = (self._tried + 1) % len(others)
        other = others[self._tried]
        lost = _TRIES * (self.seconds(other) / self.seconds(self.chosen) - 1) / _COST
        rest = min(max(lost, self._rest), _LONGEST) if math.isfinite(lost) else self._rest
        self._next = [self.chosen] * int(rest) + [other] * _TRIES
