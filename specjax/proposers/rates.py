"""`Rates`: how often recent drafts of a row were accepted, by their depth."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jax import Array

_KEPT = 0.93
"""The weight of older drafts, each time that a draft is judged: about 14 drafts count."""

_WEIGHT = 2.0
"""The drafts that the rate of earlier texts counts for in the rate of all depths together, and that
this one counts for in the rate of each depth: few drafts reach a great depth."""


@struct.dataclass
class Rates:
    """Counts with decaying weights."""

    judged: Array  # [B, D]
    accepted: Array  # [B, D]

    @classmethod
    def zeros(cls, rows: int, depth: int) -> Rates:
        return cls(*(jnp.zeros((rows, depth), jnp.float32) for _ in range(2)))

    def after(self, offered: Array, accepted: Array) -> Rates:
        """The rates after a step.

        Args:
          offered: [B] how many drafts the chains had; 0 changes nothing.
          accepted: [B] how many of them were accepted.
        """
        depth = jnp.arange(self.judged.shape[1])
        offered, accepted = offered[:, None], accepted[:, None]
        tested = (depth < offered) & (depth <= accepted)
        kept = jnp.where(tested, jnp.float32(_KEPT), jnp.float32(1))
        return Rates(
            self.judged * kept + tested,
            self.accepted * kept + (tested & (depth < accepted)),
        )

    def gains(self, present: Array, prior: Array) -> Array:
        """[B, D + 1]: the expected new tokens of a step with at most 0, 1, ... D drafts.

        Args:
          present: [B] how many drafts there are.
          prior: [] the rate before any draft of a row was judged.
        """
        accepted, judged = (x.sum(1, keepdims=True) for x in (self.accepted, self.judged))
        pooled = (accepted + _WEIGHT * prior) / (judged + _WEIGHT)
        rate = (self.accepted + _WEIGHT * pooled) / (self.judged + _WEIGHT)
        exists = jnp.arange(rate.shape[1]) < present[:, None]
        reached = jnp.cumprod(jnp.where(exists, rate, 0.0), axis=1)
        return jnp.pad(1 + jnp.cumsum(reached, axis=1), ((0, 0), (1, 0)), constant_values=1.0)
