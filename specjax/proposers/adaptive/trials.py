"""`Trials`: decides when a proposer whose drafts do not pay drafts again, within a budget."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.proposers.adaptive.policy import POLICY, Policy


@struct.dataclass
class Trials:
    """The pauses and the budget of one proposer, by row.  Times are in steps of plain decoding."""

    unused: Array  # [B] int32: steps since it last drafted, of those in which it could have
    pause: Array  # [B] int32: such steps after which it is tried again
    budget: Array  # [B] the time that trials may cost
    debt: Array  # [B] the time that drafts cost which promised to pay, less what they saved later
    policy: Policy = struct.field(pytree_node=False, default=POLICY)

    @classmethod
    def start(cls, pause: Array, budget: Array, policy: Policy = POLICY) -> Trials:
        """Returns the pauses and the budget at the start of a text."""
        budget = budget.astype(jnp.float32)
        return cls(jnp.zeros_like(pause), pause, budget, jnp.zeros_like(budget), policy)

    @property
    def barred(self) -> Array:
        """[B] bool: drafts that promised to pay have cost so much that only trials may draft."""
        return self.debt > self.policy.most_debt

    def due(self, loss: Array, otherwise_plain: Array) -> Array:
        """Returns [B] bool: whether a trial is due, and the budget covers its expected loss.

        A proposer that drafted in the last step goes on while its budget covers some more steps,
        but only where the alternative is plain decoding.  It stops at once if the other proposer
        promises more.

        Args:
          loss: [B] the expected loss of a trial.
          otherwise_plain: [B] bool, rows that have no drafts in this step without a trial.
        """
        goes_on = otherwise_plain & (loss * self.policy.ahead <= self.budget)
        waited = jnp.where(self.unused > 0, self.unused >= self.pause, goes_on)
        return waited & (loss <= self.budget)

    def waited(self, able: Array, used: Array) -> Trials:
        """Counts a step: rows `used` had drafts of this proposer, and rows `able` could have."""
        return dataclasses.replace(self, unused=jnp.where(used, 0, self.unused + able))

    def after(
        self, spent: Array, saved: Array, used: Array, tried: Array, paid: Array, pays: Array
    ) -> Trials:
        """Updates pauses and budget after a step.

        Args:
          spent: [B] the time of the step; 0 for rows that are done.
          saved: [B] the time that its tokens would have taken otherwise, less the time of the step.
          used: [B] bool, rows with drafts of this proposer.
          tried: [B] bool, of those, rows in which they were a trial.
          paid: [B] bool, rows in which the drafts saved time.
          pays: [B] bool, rows in which they are expected to save time.
        """
        longer = jnp.where(paid, self.pause // 2, 2 * self.pause)
        # A single success is often luck: the pause ends only if the rates promise to pay.
        longer = jnp.where(
            pays, 1, jnp.clip(longer, 2, jnp.maximum(self.pause, self.policy.longest_pause))
        )
        gained = jnp.where(used, saved * jnp.where(tried, 1.0, self.policy.won), 0.0)
        budget = jnp.minimum(
            self.budget + self.policy.budget_share * spent + gained,
            jnp.maximum(self.budget, self.policy.most_budget),
        )
        # Trials have a budget of their own: what they lose and save counts there, and not twice.
        lost = jnp.where(used & ~tried, -saved, 0.0)
        debt = jnp.maximum(self.debt + lost - self.policy.budget_share * spent, 0.0)
        pause = jnp.where(used, longer, self.pause)
        return dataclasses.replace(self, pause=pause, budget=budget, debt=debt)
