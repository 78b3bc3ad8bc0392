"""Computes 95 % intervals over prompts: of a ratio by a bootstrap, of a mean by Student's t."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax import Array
from numpy.typing import ArrayLike
from scipy.special import stdtrit

Interval = tuple[float, float, float]
"""A value, and the lower and upper end of its 95 % interval."""

_RESAMPLES = 2000


def interval(above: Array | ArrayLike, below: Array | ArrayLike, seed: int = 0) -> Interval | None:
    """Returns sum(above) / sum(below) over prompts with its 95 % interval, or None without any.

    The bootstrap draws prompts with replacement (Efron and Tibshirani 1993, chapter 13).  It does
    not draw tokens, because tokens of one prompt are not independent.  For a speed, `below` holds
    the median seconds of each prompt.

    Args:
      above, below: [P] numerator and denominator of each prompt.
      seed: of the bootstrap.
    """
    above, below = np.asarray(above), np.asarray(below)
    if not below.sum():
        return None
    drawn = np.random.default_rng(seed).integers(len(above), size=(_RESAMPLES, len(above)))
    sums = above[drawn].sum(1), below[drawn].sum(1)
    ratios = sums[0][sums[1] > 0] / sums[1][sums[1] > 0]
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(above.sum() / below.sum()), float(low), float(high)


def mean_interval(values: Array | ArrayLike) -> Interval | None:
    """Returns the mean over prompts with its 95 % interval; None for fewer than two prompts.

    The interval is mean +- t * s / sqrt(P), with the quantile t of Student's distribution with
    P - 1 degrees of freedom.  For two sets of scores of the same prompts, pass their differences:
    what a prompt adds to both scores cancels then (Miller 2024, arXiv 2411.00640, section 4.2).

    Args:
      values: [P] a number of each prompt, such as the mean score of its samples.
    """
    known = np.asarray(values, float)
    if len(known) < 2:
        return None
    middle = float(known.mean())
    half = float(stdtrit(len(known) - 1, 0.975) * known.std(ddof=1) / np.sqrt(len(known)))
    return middle, middle - half, middle + half


def show(value: Sequence[float] | None, form: str) -> str:
    """Returns a cell of a table: the value and, if they differ, the ends of its interval."""
    if value is None:
        return ""
    middle, *ends = (format(x, form) for x in value)
    return f"{middle} ({' to '.join(ends)})" if len(set(ends)) > 1 else middle
