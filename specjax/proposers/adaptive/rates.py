"""`Rates`: estimates how often recent drafts of a row were accepted, by their depth."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax._internal.prefix_sums import running_product, running_sum
from specjax.proposers.adaptive.policy import POLICY, Policy


@struct.dataclass
class Rates:
    """Counts of judged and accepted drafts, with decaying weights.

    The rate of all depths is followed with several windows at once.  A window's weight grows with
    how well it predicted the outcomes so far, and a share of all weight is redistributed in every
    step, as in Herbster and Warmuth 1998, "Tracking the best expert".
    """

    recent: Array  # [B, W, 2] judged and accepted, of all depths, by window
    weight: Array  # [B, W] of each window; they add up to 1
    by_depth: Array  # [B, D, 2] judged and accepted, of a long time
    rate: Array  # [B, W, D] the acceptance rate of each depth by each window
    policy: Policy = struct.field(pytree_node=False, default=POLICY)

    @classmethod
    def start(cls, rows: int, depth: int, prior: Array, policy: Policy = POLICY) -> Rates:
        """Returns empty counts for `rows` rows and chains of at most `depth` drafts.

        `prior` [] is the acceptance rate to begin with.
        """
        windows = len(policy.windows)
        recent = jnp.zeros((rows, windows, 2), jnp.float32)
        by_depth = jnp.zeros((rows, depth, 2), jnp.float32)
        return cls(
            recent,
            jnp.broadcast_to(jnp.array(policy.belief, jnp.float32), (rows, windows)),
            by_depth,
            _rates(policy, recent, by_depth, prior, jnp.array(False)),
            policy,
        )

    @property
    def slow(self) -> Array:
        """[B, 2]: the judged and accepted drafts of all depths, by the longest window."""
        return self.recent[:, -1]

    def after(self, offered: Array, accepted: Array, prior: Array, together: Array) -> Rates:
        """Returns the rates after a step.

        Args:
          offered: [B] the number of drafts of each chain; 0 changes nothing.
          accepted: [B] the number of them that were accepted.
          prior: [] the rate before any draft of a row was judged.
          together: [] or [B] bool, True if a row may learn from the other rows.
        """
        policy, depth = self.policy, jnp.arange(self.by_depth.shape[1])
        offered, accepted = offered[:, None], accepted[:, None]
        tested = (depth < offered) & (depth <= accepted)
        right = tested & (depth < accepted)
        predicted = jnp.where(right[:, None], self.rate, 1 - self.rate)
        likelihood = jnp.where(tested[:, None], predicted, 1.0).prod(2)
        weight = self.weight * likelihood + policy.least
        dealt = policy.dealt * np.array(policy.belief, np.float32)
        weight = (1 - policy.dealt) * weight / weight.sum(1, keepdims=True) + dealt
        outcomes = jnp.stack([tested, right], axis=2).astype(jnp.float32)
        new = outcomes.sum(1)
        kept = (1 - 1 / np.array(policy.windows, np.float32)) ** new[:, :1]
        kept_here = jnp.where(tested, jnp.float32(policy.kept), jnp.float32(1))
        recent = self.recent * kept[..., None] + new[:, None]
        by_depth = self.by_depth * kept_here[..., None] + outcomes
        return Rates(
            recent,
            jnp.where(offered > 0, weight, self.weight),
            by_depth,
            _rates(policy, recent, by_depth, prior, together),
            policy,
        )

    def gains(self, present: Array) -> Array:
        """Returns [B, D + 1]: the expected new tokens of a step with at most 0, 1, ... D drafts.

        `present` [B]: the number of drafts of each row.
        """
        reached = (running_product(self.rate) * self.weight[..., None]).sum(1)
        reached = jnp.where(jnp.arange(reached.shape[1]) < present[:, None], reached, 0.0)
        return jnp.pad(1 + running_sum(reached), ((0, 0), (1, 0)), constant_values=1.0)


def _rates(policy: Policy, recent: Array, by_depth: Array, prior: Array, together: Array) -> Array:
    """[B, W, D]: the acceptance rate of each depth by each window, from the counts of `Rates`."""
    prior = jnp.clip(prior, 1 - policy.most, policy.most)  # of 0 the quotients below would be NaN
    if len(recent) > 1:
        slow = recent[:, -1]
        others = slow.sum(0) - slow
        common = (others[:, 1] + policy.common * prior) / (others[:, 0] + policy.common)
        prior = jnp.where(together, common, prior)[:, None]
    windows = np.array(policy.windows, np.float32)
    # The prior fades like the drafts.
    known = policy.prior_share * jnp.maximum(windows - recent[..., 0], 0.0)
    judged = jnp.maximum(recent[..., 0] + known, 1.0)
    level = (recent[..., 1] + known * prior) / judged
    judged, accepted = by_depth[..., 0], by_depth[..., 1]
    taken, of = accepted.sum(1, keepdims=True), judged.sum(1, keepdims=True)
    alike = policy.alike * (taken + prior) / (of + 1)
    factor = (accepted + alike) / (judged * taken / jnp.maximum(of, 1.0) + alike)
    return jnp.clip(level[..., None] * factor[:, None], 1 - policy.most, policy.most)
