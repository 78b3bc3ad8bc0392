"""Tokens that the target has committed and a draft model has not read yet."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from specjax.types import Block

AT_ONCE = 2
"""A source that was left out of steps reads the tokens that it missed in passes of `AT_ONCE` times
D + 1 tokens: its cache has space for as many after the text, for a pass and its drafts.
"""


def remember(fresh: Array, block: Block) -> tuple[Array, Array]:
    """Returns `fresh` [B, D + 1], overwritten with the tokens of `block`, and their number [B]."""
    width = min(fresh.shape[1], block.tokens.shape[1])
    return fresh.at[:, :width].set(block.tokens[:, :width]), block.count


def then_pending(fresh: Array, count: Array, pending: Array) -> Array:
    """Returns [B, T + 1]: `count` [B] of the `fresh` tokens [B, T], then the pending one."""
    return jnp.pad(fresh, ((0, 0), (0, 1))).at[jnp.arange(len(pending)), count].set(pending)
