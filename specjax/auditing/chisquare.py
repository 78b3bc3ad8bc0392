"""Pearson's chi-square test, its power, and the smallest bias that it detects.

For whole degrees of freedom the tail is a sum of positive terms, so it is accurate however small:

    P(X > x) = exp(-x/2) sum_{k < d/2} (x/2)^k / k!     for even d

For odd d, k runs over the halves 1/2, 3/2, ..., and erfc(sqrt(x/2)) is added.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

_log_gamma = np.vectorize(math.lgamma, otypes=[float])


def statistic(first: np.ndarray, second: np.ndarray) -> float:
    """Computes sum((a - b)^2 / (a + b)), from the counts per cell of two equally large samples."""
    return float(np.sum((first - second) ** 2 / np.maximum(first + second, 1)))


def survival(x: float, degrees: int) -> float:
    """Computes P(X > x) for the chi-square distribution; 1 for 0 degrees."""
    if x <= 0 or degrees == 0:
        return 1.0
    odd = degrees % 2
    return (math.erfc(math.sqrt(x / 2)) if odd else 0.0) + float(
        _terms(x, np.arange(odd / 2, degrees / 2)).sum()
    )


def is_suspicious(p_value: float, significance: float) -> bool:
    """Returns whether fresh samples must decide, which fail with a p-value below `significance`.

    A p-value below s^2 fails by itself.  Of k checks of a sound decoder at least one fails with a
    probability of at most

        k (s^2 + s q)      for q = sqrt(s) / 3, the bound of a suspicion

    which is less than s for three checks and s up to 0.1.  A bias that is just too small for the
    first samples is then found by the second ones.
    """
    return significance**2 <= p_value < max(significance, math.sqrt(significance) / 3)


def power(x: float, degrees: int, noncentrality: float) -> float:
    """Computes P(X > x) for the noncentral chi-square, a Poisson mixture of central ones."""
    mean = noncentrality / 2
    more = np.arange(int(mean + 12 * math.sqrt(mean + 1)) + 20)
    gained = np.cumsum(_terms(x, degrees / 2 + more))
    tails = survival(x, degrees) + np.concatenate([[0.0], gained[:-1]])
    return float((_terms(noncentrality, more.astype(float)) * tails).sum())


def critical(significance: float, degrees: int, noncentrality: float = 0.0) -> float:
    """Computes the x that is exceeded with probability `significance`."""
    return _solve(lambda x: significance - power(x, degrees, noncentrality))


def detectable(
    samples: int,
    degrees: int,
    significance: float,
    wanted: float = 0.95,
    factor: int = 2,
    free: float = 0.0,
) -> float:
    """Computes the smallest total variation that is detected with probability `wanted`.

    Two samples of size n, from distributions with a total variation of TV, have a noncentrality of

        n sum((p - q)^2 / (p + q)) >= n (sum|p - q|)^2 / sum(p + q) = 2 n TV^2      (Cauchy and
        Schwarz)

    One sample of p, with known q, has n sum((p - q)^2 / q) >= 4 n TV^2.

    Args:
      samples: n.
      degrees: of freedom.
      significance: the p-value below which the test fails.
      wanted: the probability of detection.
      factor: 2 for two samples, 4 for one.
      free: the noncentrality that rounding may cause, for which the critical value allows.
    """
    if degrees == 0 or samples == 0:
        return 1.0
    x = critical(significance, degrees, free)
    found = _solve(lambda noncentrality: power(x, degrees, noncentrality) - wanted)
    return min(1.0, math.sqrt(found / (factor * samples)))


def _terms(x: float, k: np.ndarray) -> np.ndarray:
    """Computes exp(-x/2) (x/2)^k / Gamma(k + 1) in logarithms."""
    with np.errstate(divide="ignore"):
        return (
            np.exp(k * np.log(x / 2) - x / 2 - _log_gamma(k + 1))
            if x > 0
            else (k == 0).astype(float)
        )


def _solve(increasing: Callable[[float], float]) -> float:
    """Finds the x > 0 at which an increasing function changes its sign, by bisection."""
    low, high = 0.0, 1.0
    while increasing(high) < 0:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if increasing(middle) < 0 else (low, middle)
    return high
