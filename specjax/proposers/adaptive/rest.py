"""`Rest`: when an `Adaptive` proposer stops choosing for some steps, which then take less time."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import struct
from jax import Array

_SPAN = 128.0  # awake steps that the mean counts
_FIRST_SPAN = 8.0  # awake steps that count for the value from earlier texts
_WATCHES = 4
"""Awake steps between two rests."""
_MUCH, _AFTER = 2.0, 8
"""After a step whose drafts saved more time than `_MUCH`, it is awake for so many steps more: a
text that repeats itself often goes on so.
"""
_SHORTEST, LONGEST = 4, 32
"""Steps of a rest.  Each is twice as long as the one before, until drafts save much again."""


@struct.dataclass
class Rest:
    """Decides whether choosing pays.  Times are in steps of plain decoding.

    To look for drafts and to choose takes time in every step, also where nothing is drafted.  Where
    drafts save less than that, some steps decode plainly and do nothing else.
    """

    saved: Array  # [B] a mean of the time that an awake step saved by its drafts
    seen: Array  # [B] awake steps that the mean counts
    watch: Array  # [B] int32: awake steps until the next rest, if drafts go on to save too little
    pause: Array  # [B] int32: the steps of the next rest
    steps: Array  # [B] int32: steps to rest now

    @classmethod
    def start(cls, rows: int, saved: Array, cost: Array) -> Rest:
        """Returns the state of new texts, which rest sooner if earlier ones saved little.

        Args:
          rows: their number.
          saved: [] the mean of earlier texts.
          cost: [] what choosing takes.
        """
        pays = saved >= cost

        def each(number: Array) -> Array:
            return jnp.broadcast_to(number, (rows,))

        return cls(
            each(saved),
            jnp.full(rows, _FIRST_SPAN, jnp.float32),
            # A weak type would become a strong one in a step, and compile it again.
            each(jnp.where(pays, jnp.int32(_AFTER), _WATCHES)),
            each(jnp.where(pays, jnp.int32(_SHORTEST), LONGEST // 2)),
            jnp.zeros(rows, jnp.int32),
        )

    def after(self, saved: Array, cost: Array) -> Rest:
        """Returns the state after an awake step.

        Args:
          saved: [B] the time that its drafts saved beside steps at rest, below 0 if they cost time.
          cost: [] what choosing takes, by which an awake step is longer than one at rest; 0, also
            where nobody measured it: it never rests, even if drafts cost time, which `Trials`
            bounds.
        """
        seen = jnp.minimum(self.seen + 1, _SPAN)
        mean = self.saved + (saved - self.saved) / seen
        pays = (mean >= cost) | (cost <= 0)
        much = saved > _MUCH
        watch = jnp.where(much, _AFTER, jnp.where(pays, _WATCHES, self.watch) - 1)
        rests = ~pays & (watch <= 0)
        longer = jnp.minimum(2 * self.pause, LONGEST)
        pause = jnp.where(pays | much, _SHORTEST, jnp.where(rests, longer, self.pause))
        return dataclasses.replace(
            self,
            saved=mean,
            seen=seen,
            watch=jnp.where(rests, _WATCHES, watch),
            pause=pause,
            steps=jnp.where(rests, self.pause, 0),
        )
