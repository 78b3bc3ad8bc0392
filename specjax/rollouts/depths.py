"""`Depths`: the number of drafts of a pass, by what rows accept and by what steps take."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Sequence

import numpy as np

_WIDTHS = (1, 5, 9, 17, 33)
"""Numbers of tokens that a pass reads of a row, up to the number of drafts and one."""

_TOKEN = 0.1
"""What each token more costs before anything was measured, in passes of one token."""

_KEPT = 5
"""The newest times of which the median counts: another process disturbs single ones."""

_TURN, _MEAN = 0.5, 0.2
"""The weight of a turn in the acceptance of its row, and in that of all rows."""

_SEEN = 0.2
"""The weight of a token of plain decoding in the acceptance of its row."""

_NEW = 0.9
"""The share of its promise that counts for a program that must be compiled first."""

_PERIOD, _LONGEST = 24, 16
"""Turns until drafts are tried again, and the most times that, after tries that did not pay."""


@dataclasses.dataclass
class Row:
    """What is known of a row: its expected text, how far it is, and how much of it was accepted."""

    expected: Sequence[int]
    alpha: float  # acceptance rate of the expected text in [0, 1]
    done: int = 0  # new tokens

    @property
    def left(self) -> int:
        """Returns how many tokens of the expected text are ahead."""
        return max(len(self.expected) - self.done, 0)


class Depths:
    """Chooses how many drafts all rows get in the next turn.

    A step with K drafts takes c(K) seconds, and gives a row 1 + a + ... + a^K tokens if each draft
    is accepted with probability a (Leviathan et al. 2023, arXiv 2211.17192, equation 1).  Each row
    has its own a, and drafts of its expected text end where that does.  The K with the most tokens
    a second over all rows is taken, so a row without expectations makes drafts dearer for the
    others, and the last rows have more.  A choice changes the time of a text and not the text.

    The a of a row follows from the drafts that were accepted, and in plain decoding from the tokens
    that are those of the expected text.  Times that are not known yet are estimated from others.
    The first turn with a number of rows and of drafts compiles, so its time does not count.
    """

    def __init__(self, deepest: int, chain: bool = True, others: float = 0.3) -> None:
        """Makes a chooser.

        Args:
          deepest: the most drafts.
          chain: whether fewer drafts than these can be taken; otherwise all or none are.
          others: the acceptance rate, at first, of drafts that are not of the expected text.
        """
        widths = _WIDTHS if chain else _WIDTHS[:1]
        self.options = sorted({*(width - 1 for width in widths if width <= deepest), deepest})
        self._times = collections.defaultdict[tuple[int, int], collections.deque[float]](
            lambda: collections.deque(maxlen=_KEPT)
        )
        self._compiled = set[tuple[int, int]]()
        self._typical, self._others, self._plain, self._most = 0.9, others, 0, 0
        self._wait = _PERIOD  # turns until drafts are tried again

    def row(self, expected: Sequence[int]) -> Row:
        """Returns what is known of a row that begins."""
        return Row(expected, self._typical)

    def best(self, size: int, rows: Sequence[Row]) -> tuple[int, int]:
        """Returns the number of drafts for the next turn, and the number of its steps.

        Args:
          size: rows of the batch, those that are done included.
          rows: those that are not done.
        """
        self._most = max(self._most, size)
        # Few programs for the last rows: none or all of the drafts.
        options = self.options if size == self._most else sorted({0, self.options[-1]})
        if self._plain >= self._wait and len(options) > 1 and size == self._most:
            self._wait = min(2 * self._wait, _LONGEST * _PERIOD)
            return options[1], 1
        rates = {
            depth: (len(rows) + sum(self._gain(row, depth) for row in rows))
            / self._seconds(size, depth)
            * (1.0 if (size, depth) in self._compiled else _NEW)
            for depth in options
        }
        depth = max(options, key=lambda depth: rates[depth])
        self._wait = _PERIOD if depth else self._wait
        return depth, 4 if depth < _WIDTHS[2] - 1 else 2

    def learn(self, size: int, depth: int, seconds: float) -> None:
        """Takes note of the time of a step with `depth` drafts."""
        if (size, depth) in self._compiled:
            self._times[size, depth].append(seconds)
        self._compiled.add((size, depth))
        self._plain = 0 if depth else self._plain + 1

    def accepted(self, row: Row, depth: int, mean: float) -> None:
        """Takes note of the drafts of a row that a step accepted, a mean over the turn's steps."""
        if not depth:
            return
        alpha = _alpha_of(mean, depth)
        if row.left:
            row.alpha += _TURN * (alpha - row.alpha)
            self._typical += _MEAN * (alpha - self._typical)
        else:
            self._others += _MEAN * (alpha - self._others)

    def decoded(self, row: Row, tokens: Iterable[int]) -> None:
        """Takes note of the tokens of plain decoding that follow in a row."""
        for token, wanted in zip(tokens, row.expected[row.done :], strict=False):
            row.alpha += _SEEN * ((token == wanted) - row.alpha)

    def _gain(self, row: Row, depth: int) -> float:
        if row.left:
            return _gain(row.alpha, min(depth, row.left))
        return _gain(self._others, depth)

    def _seconds(self, size: int, depth: int) -> float:
        """Returns the time of a step: the median of its newest ones, or an estimate."""
        known = {kind: statistics.median(times) for kind, times in self._times.items() if times}
        if (size, depth) in known:
            return known[size, depth]
        tokens = size * (depth + 1)
        if not known:
            return 1 + _TOKEN * tokens
        read = np.array([rows * (drafts + 1) for rows, drafts in known], float)
        times = np.array([*known.values()])
        if len(set(read)) == 1:
            return float(times.mean() * (1 + _TOKEN * tokens) / (1 + _TOKEN * read[0]))
        # Least squares of a + b * tokens, relative to each time.
        rows = np.stack([np.ones_like(read), read], axis=1) / times[:, None]
        fixed, each = np.linalg.lstsq(rows, np.ones_like(times), rcond=None)[0]
        return float(max(fixed + max(each, 0.0) * tokens, times.min() / 2))


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
