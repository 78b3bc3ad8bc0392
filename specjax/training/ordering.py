"""The rows of a run as grain datasets: each row, and each batch, is a function of its number.

A row has `tokens` [T + 1]; `drawn` [T], 1 where the next token is part of an answer; and `limit`,
the positions before its cut.

The orders are NumPy's permutations and not those of `grain.MapDataset.shuffle`, which takes 2 ms a
row where there are ten rows (grain 0.2.18).  The shares of `turns` are exact after every row, and
those of `grain.MapDataset.mix` are rounded to a hundredth of the smallest one.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Protocol, cast, overload

import numpy as np

from specjax.training.trees import Row


class Rows(Protocol):
    """A `grain.MapDataset` of rows, by whose own type any row might be None."""

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def batch(self, batch_size: int) -> Rows: ...
    def map(self, transform: Callable[[Row], Row]) -> Rows: ...
    def map_with_index(self, transform: Callable[[int, Row], Row]) -> Rows: ...


def numbered(row: Callable[[int], Row], count: int = sys.maxsize) -> Rows:
    """Returns the rows `row(0)`, `row(1)` and so on; by default they are endless."""
    import grain  # here, since a help page needs no grain

    return cast(Rows, grain.MapDataset.range(count).map(row))


def shuffled(size: int, seed: int, read: Callable[[int, int], Row]) -> Rows:
    """Returns `read(epoch, row)` in an endless order of `size` rows, reshuffled every epoch."""

    @functools.lru_cache(2)
    def order(epoch: int) -> np.ndarray:
        return np.random.default_rng((seed, epoch)).permutation(size)

    def at(number: int) -> Row:
        epoch, index = divmod(number, size)
        return read(epoch, int(order(epoch)[index]))

    return numbered(at)


def turns(number: int, weights: Sequence[float]) -> tuple[int, int]:
    """Returns the source of a row, and the row's number within it.

    Let w be the weight of the first source, and W the sum of all weights.  Of the first n rows it
    has n w / W, rounded.  The remaining rows are divided among the later sources by the same rule.
    So the error of a source's share is at most one row for each source before it.
    """
    for source, weight in enumerate(weights[:-1]):
        share = weight / math.fsum(weights[source:])
        before, after = (math.floor(n * share + 0.5) for n in (number, number + 1))
        if after > before:
            return source, before
        number -= before
    return len(weights) - 1, number


def by_turns(parts: Sequence[Rows | None], weights: Sequence[float]) -> Rows:
    """Returns the rows of endless parts, of which each has its share after every row.

    A part may be None if its weight is 0, since it is never read.
    """

    def at(number: int) -> Row:
        part, index = turns(number, weights)
        rows = parts[part]
        assert rows is not None
        return rows[index]

    return numbered(at)


def batches(
    text: Rows | None,
    answers: Rows | None,
    size: int,
    share: float,
    own: float = 0.0,
    whole: bool = False,
) -> Rows:
    """Returns the batches of a run by their steps.

    Args:
      text: rows of text; None if `share` is 1.
      answers: rows with answers; None if `share` is 0.
      size: B, the rows of a batch.
      share: the fraction of the rows that come from `answers`.
      own: the fraction of the rows that come from `text`, and that the draft writes in the step.
      whole: True if all rows of a batch come from one source.

    Returns:
      Batches with two more arrays: `own` [B] is True where the draft writes the row, and `number`
      [B] is a number that no other row of the run has.
    """
    written = min(1.0, own / (1 - share)) if share < 1 else 0.0

    def marked(rows: Rows | None, own: float) -> Rows | None:
        def mark(number: int, row: Row) -> Row:
            is_own = turns(number, (own, 1 - own))[0] == 0
            return {**row, "own": np.full(np.shape(row["limit"]), is_own)}

        if rows is None:
            return None
        return (rows.batch(size) if whole else rows).map_with_index(mark)

    mixed = by_turns((marked(answers, 0.0), marked(text, written)), (share, 1 - share))
    numbers = np.arange(size, dtype=np.int32)
    made = mixed if whole else mixed.batch(size)
    return made.map_with_index(lambda step, rows: {**rows, "number": step * size + numbers})
