"""Masks of the tokens that a constraint allows, as booleans and as packed bits."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

FREE = np.uint32(2**32 - 1)
"""A word (32 bits) of a mask that allows all of its tokens."""

_LEAST = -1e18  # finite at every temperature: see `sampling`


def keep(logits: Array, allowed: Array) -> Array:
    """Returns float32 `logits` [..., V], with -inf for tokens that `allowed` [..., V] leaves out.

    If other settings ban all allowed tokens, these are equally probable.
    """
    return jnp.where(allowed, jnp.maximum(logits, _LEAST), -jnp.inf)


def keep_packed(logits: Array, bits: Array) -> Array:
    """Masks as `keep`, with token t in bit t % 32 of word t // 32 of `bits` [..., W] uint32.

    Logits stay as they are where all words are FREE.
    """
    each = (bits[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed = each.reshape(*bits.shape[:-1], -1)[..., : logits.shape[-1]] > 0
    free = (bits == FREE).all(-1, keepdims=True)
    return jnp.where(free, logits, keep(logits, allowed))


def words_of(size: int) -> int:
    """Returns W, the words of a mask over `size` tokens."""
    return -(-size // 32)
