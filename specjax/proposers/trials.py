"""`Trials`: when a part that does not pay is tried again, and what trials may cost."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import struct
from jax import Array

_SHARE = 0.01
"""Trials may cost so much of the time."""

_WON = 0.1
"""So much of the time that drafts of a part saved may be spent on trials of it, too: what paid
once is likelier to pay again."""

_SAVED = 8.0
"""The most that is kept for trials, in steps of plain decoding: a text that changes needs a few
trials, and one that does not would only lose more."""

_MORE = 16
"""Steps that a part which does not pay now must be able to pay for, or it is left out."""

_LONGEST = 32
"""The most steps without drafts of a part before it is tried again, if that may be paid.  The pause
doubles whenever drafts did not pay, and is 1 after they did."""


@struct.dataclass
class Trials:
    """Of one part, by row.  Times are in steps of plain decoding."""

    quiet: Array  # [B] int32: steps since it last drafted, of those in which it could have
    pause: Array  # [B] int32: such steps after which it is tried again
    purse: Array  # [B] what trials may cost

    @classmethod
    def start(cls, pause: Array, purse: Array) -> Trials:
        """Those of a text of which nothing was decoded."""
        return cls(jnp.zeros_like(pause), pause, purse.astype(jnp.float32))

    def due(self, loss: Array, otherwise_plain: Array) -> Array:
        """[B] bool: is it time for a trial, and can its expected loss be paid?

        A part that drafted in the last step goes on while it could pay for some more steps, but
        only beside plain decoding.  It leaves at once if the other part promises more.

        Args:
          loss: [B] the expected loss of a trial.
          otherwise_plain: [B] bool, rows that have no drafts in this step without a trial.
        """
        goes_on = otherwise_plain & (loss * _MORE <= self.purse)
        waited = jnp.where(self.quiet > 0, self.quiet >= self.pause, goes_on)
        return waited & (loss <= self.purse)

    def waited(self, able: Array, used: Array) -> Trials:
        """After a step with drafts of this part in rows `used`; rows `able` could have had them."""
        return dataclasses.replace(self, quiet=jnp.where(used, 0, self.quiet + able))

    def after(
        self, spent: Array, saved: Array, used: Array, tried: Array, paid: Array, pays: Array
    ) -> Trials:
        """After a step.

        Args:
          spent: [B] its time; 0 for rows that are done.
          saved: [B] what its tokens would have taken otherwise, less that time.
          used: [B] bool, rows with drafts of this part.
          tried: [B] bool, of those, rows in which they were a trial.
          paid: [B] bool, rows in which the drafts saved time.
          pays: [B] bool, rows in which they are expected to save time.
        """
        longer = jnp.where(paid, self.pause // 2, 2 * self.pause)
        # A single success is often luck: the pause ends only if the rates promise to pay.
        longer = jnp.where(pays, 1, jnp.clip(longer, 2, jnp.maximum(self.pause, _LONGEST)))
        gained = jnp.where(used, saved * jnp.where(tried, 1.0, _WON), 0.0)
        purse = jnp.minimum(self.purse + _SHARE * spent + gained, jnp.maximum(self.purse, _SAVED))
        return dataclasses.replace(self, pause=jnp.where(used, longer, self.pause), purse=purse)
