"""`Depths`: the number of drafts of a pass, by recent acceptance and by what steps take."""

from __future__ import annotations

import collections

_COST, _RATE = 0.3, 0.5
"""The weights of the newest turn in the running means of a step's time, and of acceptance."""

_PERIOD = 16
"""Turns without drafts after which a few are tried again."""


class Depths:
    """Chooses among some numbers of drafts, for each number of rows.

    It takes the number K that promises the most tokens a second.  Where each draft is accepted with
    probability a, a row gets 1 + a + ... + a^K tokens of a step (Leviathan et al. 2023, arXiv
    2211.17192, equation 1).  Here a is the number for which this holds in the newest turns, so that
    the promise for the K that was tried last is what it gave.  A choice changes the time of a text
    and not the text.  The first turn with a number of rows compiles, so its time does not count.
    """

    def __init__(self, widths: tuple[int, ...], deepest: int) -> None:
        """Makes a chooser.

        Args:
          widths: tokens that a pass may read of a row, fewer than those of the most drafts.
          deepest: the most drafts.
        """
        self.options = sorted({*(width - 1 for width in widths if width <= deepest), deepest})
        self._seconds: dict[int, dict[int, float]] = collections.defaultdict(dict)
        self._turns: collections.Counter[int] = collections.Counter()
        self._alpha, self._plain = 0.9, 0

    def best(self, rows: int) -> int:
        """Returns the number of drafts for the next turn with that number of rows."""
        seconds = self._seconds[rows]
        if self._turns[rows] == 0:
            return self.options[-1]
        untried = [depth for depth in self.options if depth not in seconds]
        if untried:
            return untried[-1]
        if self._plain >= _PERIOD and len(self.options) > 1:
            return self.options[1]
        return max(self.options, key=lambda depth: (1 + _gain(self._alpha, depth)) / seconds[depth])

    def learn(self, rows: int, depth: int, *, seconds: float, accepted: float) -> None:
        """Takes note of a turn with `depth` drafts.

        Args:
          rows: of the batch.
          depth: the most drafts of a row.
          seconds: of a step.
          accepted: drafts of a row in a step, a mean.
        """
        first = self._turns[rows] == 0
        self._turns[rows] += 1
        if depth:
            self._alpha += _RATE * (_alpha_of(accepted, depth) - self._alpha)
        self._plain = 0 if depth else self._plain + 1
        if not first:
            known = self._seconds[rows]
            known[depth] = known.get(depth, seconds) * (1 - _COST) + seconds * _COST


def _gain(alpha: float, depth: int) -> float:
    """Returns the accepted drafts of a step with `depth` drafts, a mean."""
    return sum(alpha**n for n in range(1, depth + 1))


def _alpha_of(accepted: float, depth: int) -> float:
    """Returns the number in [0, 1] of which `accepted` is the `_gain`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if _gain(middle, depth) < accepted else (low, middle)
    return (low + high) / 2
