"""`Depths`: the number of drafts of a pass, by the tokens a second that each number gave."""

from __future__ import annotations

import collections

_SHARE = 0.3
"""The weight of the newest turn in the running mean of a number's tokens a second."""

_PERIOD = 24
"""Turns after which the number that was tried longest ago is tried again."""


class Depths:
    """Chooses among some numbers of drafts, for each number of rows.

    A choice changes the time of a text and not the text.  The first turn with a number of rows
    compiles, so its time does not count.
    """

    def __init__(self, widths: tuple[int, ...], deepest: int) -> None:
        """Makes a chooser.

        Args:
          widths: tokens that a pass may read of a row, fewer than those of the most drafts.
          deepest: the most drafts.
        """
        self.options = sorted({*(width - 1 for width in widths if width <= deepest), deepest})
        self._rates: dict[int, dict[int, float]] = collections.defaultdict(dict)
        self._tried: dict[int, dict[int, int]] = collections.defaultdict(dict)
        self._turns: collections.Counter[int] = collections.Counter()

    def best(self, rows: int) -> int:
        """Returns the number of drafts for the next turn with so many rows."""
        rates, tried = self._rates[rows], self._tried[rows]
        if self._turns[rows] == 0:
            return self.options[-1]
        untried = [depth for depth in self.options if depth not in rates]
        if untried:
            return untried[-1]
        if self._turns[rows] % _PERIOD == 0:
            return min(self.options, key=lambda depth: tried[depth])
        return max(self.options, key=lambda depth: rates[depth])

    def learn(self, rows: int, depth: int, tokens: int, seconds: float) -> None:
        """Takes note of a turn with `depth` drafts, its new tokens and its time."""
        turn = self._turns[rows]
        self._turns[rows] += 1
        if turn == 0:
            return
        rate, rates = tokens / max(seconds, 1e-9), self._rates[rows]
        rates[depth] = rate if depth not in rates else (1 - _SHARE) * rates[depth] + _SHARE * rate
        self._tried[rows][depth] = turn
