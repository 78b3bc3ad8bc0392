"""`Survival`: how likely a drafted node is accepted once its parent is, learned while decoding."""

from __future__ import annotations

from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

TRUSTED = (1.0, 0.0, 0.0)
"""The numbers of a source whose probabilities are chances: scale, bias, and bias of siblings."""

_DOUBT = (0.3, 0.7, 0.7)
"""The standard deviations of these numbers before any draft was judged."""

_CERTAINTY = np.diag(1 / np.square(np.array(_DOUBT, np.float32)))

_KEPT = 0.99
"""What a step leaves of the certainty above that, so that a text that changes is followed.

It never falls below it: drafts that are all right tell nothing, and the matrix would fade to 0.
"""

_MOST = 12.0  # the greatest log-odds that are told apart
_SCALES = (0.05, 4.0)


@struct.dataclass
class Survival:
    """A logistic regression for each row, with a Newton step after each step of decoding.

    The log-odds of a draft are `scale` times those of the source's probability, plus a bias, which
    is another one for the first child of a parent than for its siblings.  A chance is therefore
    never greater than that of a better sibling.

    Reference: the two-parameter survival of TreeSpark, arXiv 2609.22098; the update is that of an
    extended Kalman filter, as in Puskorius and Feldkamp 1991.
    """

    numbers: Array  # [B, 3] scale, bias, and what is added to it for siblings; at most 0
    precision: Array  # [B, 3, 3] the inverse of their covariance

    @classmethod
    def start(cls, prior: Array) -> Self:
        """Returns what is known before any draft was judged; `prior` [B, 3] are the numbers."""
        return cls(prior, jnp.broadcast_to(_CERTAINTY, (len(prior), *_CERTAINTY.shape)))

    def chance(self, given: Array) -> Array:
        """Returns [B, M, K] log-chances of the K children of M parents, if the parent is accepted.

        `given` [B, M, K] are the logarithms of the source's probabilities, best first.
        """
        sibling = jnp.arange(given.shape[-1]) > 0
        scale, bias, more = (self.numbers[:, i, None, None] for i in range(3))
        return jax.nn.log_sigmoid(scale * log_odds(given) + bias + more * sibling)

    def after(self, given: Array, sibling: Array, judged: Array, right: Array) -> Self:
        """Returns what is known after a step.

        Args:
          given: [B, N] logarithms of the source's probabilities.
          sibling: [B, N] bool, nodes that are not the first child of their parent.
          judged: [B, N] bool, drafts whose parent was accepted.
          right: [B, N] bool, drafts that were accepted, among those that were judged.
        """
        one = jnp.ones_like(given)
        seen = jnp.stack([log_odds(given), one, sibling.astype(given.dtype)], axis=2)
        seen = jnp.where(judged[..., None], seen, 0.0)
        expected = jax.nn.sigmoid(jnp.einsum("bnk,bk->bn", seen, self.numbers))
        error = jnp.where(judged, right - expected, 0.0)
        # A step in which nothing was judged changes nothing.
        kept = jnp.where(judged.any(1), _KEPT, 1.0)[:, None, None]
        known = expected * (1 - expected)
        precision = kept * self.precision + (1 - kept) * _CERTAINTY
        precision += jnp.einsum("bn,bnk,bnl->bkl", known, seen, seen)
        slope = jnp.einsum("bn,bnk->bk", error, seen)
        moved = self.numbers + _solved(precision, slope)
        scale = jnp.clip(moved[:, 0], *_SCALES)
        bias = jnp.clip(moved[:, 1], -_MOST, _MOST)
        more = jnp.clip(moved[:, 2], -_MOST, 0.0)
        return type(self)(jnp.stack([scale, bias, more], axis=1), precision)


def log_odds(given: Array) -> Array:
    """Returns log(p / (1 - p)) of probabilities p, whose logarithms are given, within bounds."""
    bounded = jnp.clip(given, -_MOST, -np.exp(-_MOST))
    return bounded - jnp.log1p(-jnp.exp(bounded))


def _solved(matrix: Array, vector: Array) -> Array:
    """Returns [B, 3]: matrix^-1 vector of symmetric matrices [B, 3, 3], by their cofactors."""
    a, b, c = (matrix[:, i] for i in range(3))
    rows = jnp.stack([jnp.cross(b, c), jnp.cross(c, a), jnp.cross(a, b)], axis=1)
    determinant = (a * rows[:, 0]).sum(1)
    return jnp.einsum("bkl,bk->bl", rows, vector) / determinant[:, None]
