"""`Trials`: when a proposer whose drafts do not pay drafts again, and the budget for that."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import struct
from jax import Array

_SHARE = 0.01
"""The share of the decoding time that trials may cost."""

_WON = 0.1
"""Drafts save time, and trials of the same proposer may also cost this share of the saved time:
drafts that paid once are likelier to pay again."""

_SAVED = 8.0
"""The largest budget, in steps of plain decoding: a text that changes needs a few trials, and
another text would only lose more."""

_MORE = 16
"""A proposer whose drafts do not pay goes on only while its budget covers this many steps."""

_LONGEST = 32
"""The longest pause, in steps without drafts, before a trial, if the budget covers one.  The pause
doubles whenever drafts did not pay, and is 1 after they did."""


@struct.dataclass
class Trials:
    """The pauses and the budget of one proposer, by row.  Times are in steps of plain decoding."""

    unused: Array  # [B] int32: steps since it last drafted, of those in which it could have
    pause: Array  # [B] int32: such steps after which it is tried again
    budget: Array  # [B] the time that trials may cost

    @classmethod
    def start(cls, pause: Array, budget: Array) -> Trials:
        """Returns the pauses and the budget at the start of a text."""
        return cls(jnp.zeros_like(pause), pause, budget.astype(jnp.float32))

    def due(self, loss: Array, otherwise_plain: Array) -> Array:
        """Returns [B] bool: whether a trial is due, and the budget covers its expected loss.

        A proposer that drafted in the last step goes on while its budget covers some more steps,
        but only where the alternative is plain decoding.  It stops at once if the other proposer
        promises more.

        Args:
          loss: [B] the expected loss of a trial.
          otherwise_plain: [B] bool, rows that have no drafts in this step without a trial.
        """
        goes_on = otherwise_plain & (loss * _MORE <= self.budget)
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
          saved: [B] what its tokens would have taken otherwise, less that time.
          used: [B] bool, rows with drafts of this proposer.
          tried: [B] bool, of those, rows in which they were a trial.
          paid: [B] bool, rows in which the drafts saved time.
          pays: [B] bool, rows in which they are expected to save time.
        """
        longer = jnp.where(paid, self.pause // 2, 2 * self.pause)
        # A single success is often luck: the pause ends only if the rates promise to pay.
        longer = jnp.where(pays, 1, jnp.clip(longer, 2, jnp.maximum(self.pause, _LONGEST)))
        gained = jnp.where(used, saved * jnp.where(tried, 1.0, _WON), 0.0)
        budget = jnp.minimum(
            self.budget + _SHARE * spent + gained, jnp.maximum(self.budget, _SAVED)
        )
        return dataclasses.replace(self, pause=jnp.where(used, longer, self.pause), budget=budget)
