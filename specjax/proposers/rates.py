"""`Rates`: how often recent drafts of a row were accepted, by their depth."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax._internal.prefix_sums import running_product, running_sum

_WINDOWS = np.array([8.0, 32.0, 128.0, 512.0], np.float32)
"""About so many of the last drafts count in a rate.  The short windows follow a text that changes,
and the long ones say for sure what pays in a text that does not."""

_BELIEF = _WINDOWS / _WINDOWS.sum()
"""The weight of each window before it predicted anything: most texts stay as they are."""

_SLOW = 3
"""The window of `Rates.slow`."""

_PRIOR = 0.25
"""The drafts that the rate of earlier texts counts for, as a share of a window."""

_SHARED = 0.02
"""The share of the weight that is dealt out anew among the windows after each step, so that none
is lost for good."""

_COMMON = 32.0
"""The drafts that it counts for beside those of all rows of a batch."""

_PROFILE, _SHRUNK = 0.995, 32.0
"""The weight of older drafts in what tells the depths apart, and the drafts that `no difference`
counts for: few drafts reach a great depth."""

_LEAST = 1e-30
"""Added to each weight, so that they do not add up to 0 after many surprising outcomes."""

_MOST = 0.99
"""No draft is surer than this."""


@struct.dataclass
class Rates:
    """Counts with decaying weights.

    The rate of all depths is followed with several windows at once.  Each window is believed as
    far as it predicted the outcomes so far, and a part of the weight is dealt out anew in every
    step, as in Herbster and Warmuth 1998, "Tracking the best expert".
    """

    recent: Array  # [B, W, 2] judged and accepted, of all depths, by window
    weight: Array  # [B, W] of each window; they add up to 1
    by_depth: Array  # [B, D, 2] judged and accepted, of a long time
    rate: Array  # [B, W, D] the acceptance rate of each depth by each window

    @classmethod
    def start(cls, rows: int, depth: int, prior: Array) -> Rates:
        """Nothing was counted yet, for `rows` rows and chains of at most `depth` drafts.

        `prior` [] is the acceptance rate to begin with.
        """
        windows = len(_WINDOWS)
        recent = jnp.zeros((rows, windows, 2), jnp.float32)
        by_depth = jnp.zeros((rows, depth, 2), jnp.float32)
        return cls(
            recent,
            jnp.broadcast_to(jnp.asarray(_BELIEF), (rows, windows)),
            by_depth,
            _rates(recent, by_depth, prior, jnp.array(False)),
        )

    @property
    def slow(self) -> Array:
        """[B, 2]: judged and accepted drafts of all depths, of about the last 512."""
        return self.recent[:, _SLOW]

    def after(self, offered: Array, accepted: Array, prior: Array, together: Array) -> Rates:
        """The rates after a step.

        Args:
          offered: [B] how many drafts the chains had; 0 changes nothing.
          accepted: [B] how many of them were accepted.
          prior: [] the rate before any draft of a row was judged.
          together: [] or [B] bool, may a row learn from the other rows?
        """
        depth = jnp.arange(self.by_depth.shape[1])
        offered, accepted = offered[:, None], accepted[:, None]
        tested = (depth < offered) & (depth <= accepted)
        right = tested & (depth < accepted)
        predicted = jnp.where(right[:, None], self.rate, 1 - self.rate)
        likelihood = jnp.where(tested[:, None], predicted, 1.0).prod(2)
        weight = self.weight * likelihood + _LEAST
        weight = (1 - _SHARED) * weight / weight.sum(1, keepdims=True) + _SHARED * _BELIEF
        outcomes = jnp.stack([tested, right], axis=2).astype(jnp.float32)
        new = outcomes.sum(1)
        kept = (1 - 1 / _WINDOWS) ** new[:, :1]
        kept_here = jnp.where(tested, jnp.float32(_PROFILE), jnp.float32(1))
        recent = self.recent * kept[..., None] + new[:, None]
        by_depth = self.by_depth * kept_here[..., None] + outcomes
        return Rates(
            recent,
            jnp.where(offered > 0, weight, self.weight),
            by_depth,
            _rates(recent, by_depth, prior, together),
        )

    def gains(self, present: Array) -> Array:
        """[B, D + 1]: the expected new tokens of a step with at most 0, 1, ... D drafts.

        `present` [B]: how many drafts there are.
        """
        reached = (running_product(self.rate) * self.weight[..., None]).sum(1)
        reached = jnp.where(jnp.arange(reached.shape[1]) < present[:, None], reached, 0.0)
        return jnp.pad(1 + running_sum(reached), ((0, 0), (1, 0)), constant_values=1.0)


def _rates(recent: Array, by_depth: Array, prior: Array, together: Array) -> Array:
    """[B, W, D]: the acceptance rate of each depth by each window, from the counts of `Rates`."""
    prior = jnp.clip(prior, 1 - _MOST, _MOST)  # of 0 the quotients below would be NaN
    if len(recent) > 1:
        slow = recent[:, _SLOW]
        others = slow.sum(0) - slow
        common = (others[:, 1] + _COMMON * prior) / (others[:, 0] + _COMMON)
        prior = jnp.where(together, common, prior)[:, None]
    # The prior fades like the drafts.
    known = _PRIOR * jnp.maximum(_WINDOWS - recent[..., 0], 0.0)
    judged = jnp.maximum(recent[..., 0] + known, 1.0)
    level = (recent[..., 1] + known * prior) / judged
    judged, accepted = by_depth[..., 0], by_depth[..., 1]
    taken, of = accepted.sum(1, keepdims=True), judged.sum(1, keepdims=True)
    alike = _SHRUNK * (taken + prior) / (of + 1)
    factor = (accepted + alike) / (judged * taken / jnp.maximum(of, 1.0) + alike)
    return jnp.clip(level[..., None] * factor[:, None], 1 - _MOST, _MOST)
