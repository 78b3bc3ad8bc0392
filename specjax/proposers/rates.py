"""`Rates`: how often recent drafts of a row were accepted, by their depth."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jax import Array

_KEPT, _SLOWLY = 0.96, 0.99
"""The weight of older drafts, each time that a draft is judged: about 25 drafts count in the rates
by depth, and about 100 in the rate of all depths that these start from."""

_FORGOTTEN = 0.95
"""The weight of what is known by depth after each step without drafts."""

_WEIGHT = 8.0
"""The drafts that the rate of earlier texts counts for in that of this text, that one in the rate
of recent drafts, and this in the rate of each depth: few drafts reach a great depth."""


@struct.dataclass
class Rates:
    """Counts with decaying weights."""

    judged: Array  # [B, D]
    accepted: Array  # [B, D]
    slow: Array  # [B, 2] judged and accepted, of all depths, which decay more slowly

    @classmethod
    def zeros(cls, rows: int, depth: int) -> Rates:
        """Nothing was counted yet, for `rows` rows and chains of at most `depth` drafts."""
        return cls(*(jnp.zeros((rows, size), jnp.float32) for size in (depth, depth, 2)))

    def after(self, offered: Array, accepted: Array) -> Rates:
        """The rates after a step.

        Args:
          offered: [B] how many drafts the chains had; 0 changes nothing.
          accepted: [B] how many of them were accepted.
        """
        depth = jnp.arange(self.judged.shape[1])
        offered, accepted = offered[:, None], accepted[:, None]
        tested = (depth < offered) & (depth <= accepted)
        right = tested & (depth < accepted)
        kept = jnp.where(tested, jnp.float32(_KEPT), jnp.float32(1))
        new = jnp.stack([tested.sum(1), right.sum(1)], axis=1).astype(jnp.float32)
        slowly = jnp.float32(_SLOWLY) ** new[:, :1]
        return Rates(
            self.judged * kept + tested, self.accepted * kept + right, self.slow * slowly + new
        )

    def rested(self, waited: Array) -> Rates:
        """The rates after a step in which rows [B] bool could have had drafts and had none."""
        kept = jnp.where(waited, jnp.float32(_FORGOTTEN), jnp.float32(1))[:, None]
        return Rates(self.judged * kept, self.accepted * kept, self.slow)

    def gains(self, present: Array, prior: Array) -> Array:
        """[B, D + 1]: the expected new tokens of a step with at most 0, 1, ... D drafts.

        Args:
          present: [B] how many drafts there are.
          prior: [] the rate before any draft of a row was judged.
        """
        accepted, judged = (x.sum(1, keepdims=True) for x in (self.accepted, self.judged))
        slow = (self.slow[:, 1:] + _WEIGHT * prior) / (self.slow[:, :1] + _WEIGHT)
        pooled = (accepted + _WEIGHT * slow) / (judged + _WEIGHT)
        rate = (self.accepted + _WEIGHT * pooled) / (self.judged + _WEIGHT)
        exists = jnp.arange(rate.shape[1]) < present[:, None]
        reached = jnp.cumprod(jnp.where(exists, rate, 0.0), axis=1)
        return jnp.pad(1 + jnp.cumsum(reached, axis=1), ((0, 0), (1, 0)), constant_values=1.0)
