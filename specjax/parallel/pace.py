"""Which way of drafting takes the least time for a step, by measured times.

A step emits the same tokens in each way, so the seconds of a step are all there is to compare.
"""

from __future__ import annotations

import statistics

FIRST = 6  # steps of each way before the first choice
_TRIES, _REST, _LONGEST = 4, 64, 1024  # steps in which another way is tried, and between trials
_KEPT = 9
_GAIN = 0.02  # another way must be faster by this share of the time


class Pace:
    """Seconds for a step of each way.  Ways are the numbers 0 ... ways - 1."""

    def __init__(self, ways: int) -> None:
        self._seconds: list[list[float]] = [[] for _ in range(ways)]
        self._rest, self._tried = _REST, 0
        self.chosen = 0
        # The first step of a way follows another way, so it is not counted.
        self._next = [way for way in range(ways) for _ in range(FIRST + 1)]

    def next(self) -> int:
        """The way of the next step."""
        if not self._next:
            self._choose()
        return self._next.pop(0)

    def record(self, way: int, seconds: float) -> None:
        """The seconds of a step that followed another one of the same way."""
        self._seconds[way] = [*self._seconds[way], seconds][-_KEPT:]

    def seconds(self, way: int) -> float:
        """The median of the last steps of a way; infinite before its first one."""
        return statistics.median(self._seconds[way]) if self._seconds[way] else float("inf")

    def _choose(self) -> None:
        """Choose the fastest way.  Another one is tried later on, and less often each time."""
        ways = range(len(self._seconds))
        best = min(ways, key=self.seconds)
        if self.seconds(best) < (1 - _GAIN) * self.seconds(self.chosen):
            self.chosen, self._rest = best, _REST
        else:
            self._rest = min(2 * self._rest, _LONGEST)
        others = [way for way in ways if way != self.chosen]
        self._next = [self.chosen] * self._rest
        if others:
            self._tried = (self._tried + 1) % len(others)
            self._next += [others[self._tried]] * _TRIES
