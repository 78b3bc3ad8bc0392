"""`Settling`: for how many steps an `Adaptive` proposer keeps its choice."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import struct
from jax import Array

_FIRST, _LONGER, LONGEST = 4, 4, 32
"""Steps of the first spell, the factor from one spell to the next, and steps of the longest."""


@struct.dataclass
class Settling:
    """Counts how often the same drafts were chosen.

    To look for other drafts, to choose, and to branch between programs takes time in every step.
    So drafts that were chosen twice are kept for a spell of some steps, and for a longer one if
    they are chosen again after it.
    """

    steps: Array  # [B] int32: steps before the next choice
    spell: Array  # [B] int32: steps that follow the next choice, if it is the same

    @classmethod
    def start(cls, rows: int) -> Settling:
        """Returns the state of new texts."""
        zero = jnp.zeros(rows, jnp.int32)
        return cls(zero, zero)

    def chosen(self, same: Array) -> Settling:
        """Returns the state after a choice; `same` [B] bool: it was of drafts that can be kept."""
        longer = jnp.clip(_LONGER * self.spell, _FIRST, LONGEST)
        return Settling(jnp.where(same, 1 + self.spell, 1), jnp.where(same, longer, 0))

    def after(self, pays: Array) -> Settling:
        """Returns the state after a step; a spell ends where drafts do not pay, [B] bool."""
        return dataclasses.replace(self, steps=jnp.where(pays, jnp.maximum(self.steps - 1, 0), 0))
