"""`Depths`: the number of drafts of a pass, by what rows accept and by what steps take."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_WIDTHS = (1, 6, 12, 16, 32)
"""Numbers of tokens that a pass reads of a row, up to the number of drafts and one: four rows of 12
tokens, or eight of 6, are the most for which every CPU with AVX-512 has kernels for products in
float32, and 16 tokens of a row are the most for which it has one for attention.
"""

_WIDE = 64
"""Tokens of a pass that a processor reads well, whatever it is."""

_TOKEN = 0.1
"""What each token more costs before anything was measured, in passes of one token."""

_KEPT = 5
"""The newest times of which the median counts: another process disturbs single ones."""

_SURE = 3
"""The fewest times of which the median counts even if it is longer than the estimate from others:
the first ones are often disturbed, and what is thought slow is not measured again.
"""

_RENEWED = 32
"""Turns after which estimates of times follow the times that are known."""

_TURN, _MEAN = 0.5, 0.2
"""The weight of a turn in the acceptance of its row, and in that of all rows."""

_SHARED, _FADING = 32.0, 0.99
"""Tokens that the rate of all rows counts in that of one, and what is left of a count a token."""

_NEW, _LATER, _SOON = 0.9, 1.2, 24
"""The share of its promise that counts for a program that must be compiled first, and after
so many turns with drafts of this number of rows, when a faster one pays for long.
"""

_TRIED, _RARER = 0.005, 16
"""The share of the time of plain decoding that may be spent on trying drafts again, and the most
times that it is divided by, after tries that did not pay.
"""

_STEPS = 8
"""The most steps of a turn of plain decoding, and the half of them where a row may end before."""


class Turn(NamedTuple):
    """What rows do next."""

    drafts: int  # of a pass; 0 is plain decoding
    steps: int
    rows: Sequence[int]  # which take part, among those that are not done


@dataclasses.dataclass
class Row:
    """What is known of a row: its expected text, how far it is, and how much of it was accepted."""

    expected: Sequence[int]
    alpha: float  # acceptance rate of the expected text in [0, 1], while the row follows it
    lost: float = 0.5  # the same after a token that was not expected
    done: int = 0  # new tokens
    most: int = 2**31 - 1  # new tokens that it may have
    follows: bool = True  # whether the last token was the expected one
    seen: float = 0.0  # tokens after expected ones, old ones fading
    missed: float = 0.0  # those of them that were not expected

    @property
    def left(self) -> int:
        """Returns how many tokens of the expected text are ahead."""
        return max(len(self.expected) - self.done, 0)


class Depths:
    """Chooses how many drafts rows get in the next turn, and which rows take part in it.

    A step with K drafts takes c(K) seconds, and gives a row 1 + a + ... + a^K tokens if each draft
    is accepted with probability a (Leviathan et al. 2023, arXiv 2211.17192, equation 1).  Each row
    has its own a, and drafts of its expected text end where that does.  The K with the most tokens
    a second is taken, so the last rows have more drafts.  Where only some rows have expected tokens
    ahead, these may take turns alone, until all can decode plainly: the others would make each pass
    dearer, and gain one token.  So may those of them that follow their texts.  A choice
    changes the time of a text and not the text.

    While a row follows its expected text, its a is the share of tokens that were expected after
    such ones, in this row and in all.  After another token it follows from the drafts that were
    accepted since.  What is looked up is tried again after some plain decoding, which takes at most
    a two-hundredth of the time.  Times that are not known yet are estimated from others, and so are
    those that were measured less than `_SURE` times, if the estimate is shorter.  The first turn
    with a number of rows and of drafts compiles, so its time does not count.
    """

    def __init__(
        self, deepest: int, chain: bool = True, others: float = 0.3, together: int = 1
    ) -> None:
        """Makes a chooser.

        Args:
          deepest: the most drafts.
          chain: whether fewer drafts than these can be taken; otherwise all or none are.
          others: the acceptance rate, at first, of drafts that are not of the expected text.
          together: devices among which rows are split: a batch has a multiple of this number.
        """
        widths = _WIDTHS if chain else _WIDTHS[:1]
        self.options = sorted({*(width - 1 for width in widths if width <= deepest), deepest})
        self.together = together
        self._times = collections.defaultdict[tuple[int, int], collections.deque[float]](
            lambda: collections.deque(maxlen=_KEPT)
        )
        self._turns = collections.Counter[int]()  # with drafts, by rows
        self._typical_times = dict[tuple[int, int], float]()
        self._estimates = dict[tuple[int, int], float]()  # of times that are not known well
        self._until = 0  # turns until they are made again
        self._compiled = set[tuple[int, int]]()
        self._typical, self._lost, self._others, self._most = 0.9, 0.5, others, 0
        self._plain, self._rarer = 0.0, 1  # seconds of plain decoding since drafts were tried

    def row(self, expected: Sequence[int]) -> Row:
        """Returns what is known of a row that begins."""
        return Row(expected, self._typical, self._lost)

    def padded(self, rows: int) -> int:
        """Returns the rows of the smallest batch that has room for this many."""
        each = -(-rows // self.together)
        return self.together << (each - 1).bit_length()

    def best(
        self, size: int, rows: Sequence[Row], *, apart: bool = True, tries: bool = True
    ) -> Turn:
        """Returns what the rows do next.

        Args:
          size: rows of the batch, those that are done included.
          rows: those that are not done.
          apart: whether some rows can take a turn without the others.
          tries: whether drafts are looked up, too, and not only expected.
        """
        self._most = max(self._most, size)
        every = range(len(rows))
        if tries and len(self.options) > 1 and size == self._most:
            few = self.options[1]
            dearer = max(self._seconds(size, few) - self._seconds(size, 0), 0.0)
            if self._plain * _TRIED > dearer * self._rarer:
                self._rarer = min(2 * self._rarer, _RARER)
                self._plain = 0.0
                return Turn(few, 1, every)
        best, most = Turn(0, 1, every), len(rows) * self._worth(size, 0)
        groups: list[tuple[Sequence[int], int]] = [(every, size)]
        ahead = [n for n, row in enumerate(rows) if row.left]
        following = [n for n in ahead if rows[n].follows]
        for some in (ahead, following)[: 2 if len(following) < len(ahead) else 1]:
            if apart and 0 < len(some) < len(rows):
                groups.append((some, self.padded(len(some))))
        for group, batch in groups:
            for depth in self._some(batch):
                tokens = len(group) + sum(self._gain(rows[n], depth) for n in group)
                if (rate := tokens * self._worth(batch, depth)) > most:
                    most = rate
                    left = max([rows[n].left for n in group]) * len(group) / tokens
                    best = Turn(depth, min(max(int(left), 1), 4), group)
        if best.drafts:
            self._rarer = 1
            return best
        last = min((row.most - row.done for row in rows), default=1)
        return best._replace(steps=_STEPS if last >= _STEPS else _STEPS // 2)

    def learn(self, size: int, depth: int, seconds: float, steps: int = 1) -> None:
        """Takes note of the time of each of some steps with `depth` drafts."""
        self._until -= 1
        if (size, depth) in self._compiled:
            if self._until < 0 or (size, depth) not in self._typical_times:
                self._estimates.clear()
                self._until = _RENEWED
            self._times[size, depth].append(seconds)
            self._typical_times[size, depth] = statistics.median(self._times[size, depth])
            self._plain = 0.0 if depth else self._plain + seconds * steps
        self._compiled.add((size, depth))
        self._turns[size] += depth > 0

    def accepted(self, row: Row, depth: int, mean: float) -> None:
        """Takes note of the drafts of a row that a step accepted, a mean over the turn's steps."""
        if not depth:
            return
        alpha = _alpha_of(mean, depth)
        if not row.left:
            self._others += _MEAN * (alpha - self._others)
        elif not row.follows:
            row.lost += _TURN * (alpha - row.lost)
            self._lost += _MEAN * (alpha - self._lost)

    def decoded(self, row: Row, tokens: Sequence[int]) -> None:
        """Takes note of the tokens that follow in a row, whose `done` is still that before."""
        for token, wanted in zip(tokens, row.expected[row.done :], strict=False):
            if row.follows:
                missed = token != wanted
                row.seen = _FADING * row.seen + 1
                row.missed = _FADING * row.missed + missed
                self._typical += (1 - _FADING) * (1 - missed - self._typical)
            elif token == wanted:
                row.lost = max(row.lost, self._lost)
            row.follows = token == wanted
        row.alpha = 1 - (row.missed + _SHARED * (1 - self._typical)) / (row.seen + _SHARED)

    def _gain(self, row: Row, depth: int) -> float:
        if row.left:
            alpha = row.alpha if row.follows else row.lost
            return _gain(alpha, min(depth, row.left))
        return _gain(self._others, depth)

    def _some(self, size: int) -> list[int]:
        """Returns the numbers of drafts to choose from: few for the last rows, to compile less."""
        if size == self._most:
            return self.options[1:]
        fits = [depth for depth in self.options[1:] if size * (depth + 1) <= _WIDE]
        return sorted({max(fits, default=self.options[-1]), self.options[-1]} - {0})

    def _worth(self, size: int, depth: int) -> float:
        """Returns the steps of a second, fewer for a program that must be compiled first."""
        share = 1.0
        if depth and (size, depth) not in self._compiled:
            share = _LATER if self._turns[size] >= _SOON else _NEW
        return share / self._seconds(size, depth)

    def _seconds(self, size: int, depth: int) -> float:
        """Returns the time of a step: the median of its newest ones, or an estimate."""
        measured = self._typical_times.get((size, depth), float("inf"))
        if len(self._times.get((size, depth), ())) >= _SURE:
            return measured
        if (size, depth) not in self._estimates:
            self._estimates[size, depth] = self._estimate(size, depth)
        return min(measured, self._estimates[size, depth])

    def _estimate(self, size: int, depth: int) -> float:
        """Returns the time of a step with numbers of rows and drafts that hardly any has had."""
        others = {case: t for case, t in self._typical_times.items() if case != (size, depth)}
        known = {case: t for case, t in others.items() if len(self._times[case]) >= _SURE} or others
        tokens = size * (depth + 1)
        if not known:
            return self._typical_times.get((size, depth), 1 + _TOKEN * tokens)
        read = np.array([rows * (drafts + 1) for rows, drafts in known], float)
        times = np.array([*known.values()])
        if len(set(read)) == 1:
            return float(times.mean() * (1 + _TOKEN * tokens) / (1 + _TOKEN * read[0]))
        # Least squares of a + b * tokens, relative to each time.
        x, y = read / times, 1 / times
        (yy, xy, xx), one = (y @ y, x @ y, x @ x), (y.sum(), x.sum())
        each = (yy * one[1] - xy * one[0]) / max(yy * xx - xy * xy, 1e-12 * yy * xx)
        each = max(each, 0.0)
        return float(max((one[0] - each * xy) / yy + each * tokens, times.min() / 2))


def _gain(alpha: float, depth: int) -> float:
    """Returns the accepted drafts of a step with `depth` drafts, a mean."""
    return depth if alpha > 1 - 1e-6 else alpha * (1 - alpha**depth) / (1 - alpha)


def _alpha_of(accepted: float, depth: int) -> float:
    """Returns the number in [0, 1] of which `accepted` is the `_gain`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if _gain(middle, depth) < accepted else (low, middle)
    return (low + high) / 2
