"""Computes attention of few tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from specjax.kernels import available

MOST_TOKENS = 16
"""The most tokens of a kernel: more are bound by computation, where XLA's products are faster."""

_TYPES = ("float32", "bfloat16")
LARGEST = 512  # the loops over the numbers of a head are partly written out


def takes_attention(query: Array, keys: Array, softcap: float | None) -> bool:
    """Returns whether `few_queries` computes the attention of these queries."""
    return fits(query, keys) and keys.size > 0 and _made(keys, softcap) is not None


def fits(query: Array, keys: Array) -> bool:
    """Returns whether a kernel takes the shapes and dtypes; keys are [B or P, K, slots, D]."""
    _, width, heads, dim = query.shape
    return (
        0 < width <= MOST_TOKENS
        and 0 < dim <= LARGEST
        and query.size > 0
        and heads % keys.shape[1] == 0
        and keys.dtype.name in _TYPES
    )


def few_queries(
    query: Array, keys: Array, values: Array, visible: Array, scale: float, softcap: float | None
) -> Array:
    """Computes softmax attention in a program for one CPU.

    Args:
      query: [B, N, H, D] of any dtype, N at most `MOST_TOKENS`.
      keys, values: [B, K, S, D], both float32 or both bfloat16; H is a multiple of K.
      visible: [B or 1, N, S] bool.  Slots that a token does not see may have any contents.
      scale: of the scores.
      softcap: c of the scores c tanh(x / c), or None.

    Returns:
      [B, N, H, D] float32; 0 for a token that sees no slot.
    """
    target = _made(keys, softcap)
    if target is None:
        raise ValueError(
            f"no kernel for {keys.dtype.name} on this CPU; ask `takes_attention` first"
        )
    numbers = jnp.asarray([scale, softcap or 0.0], jnp.float32)
    shape = jax.ShapeDtypeStruct(query.shape, jnp.float32)
    call = jax.ffi.ffi_call(target, shape, vmap_method="sequential")
    return call(query.astype(jnp.float32), keys, values, visible, numbers)


def _made(keys: Array, softcap: float | None) -> str | None:
    return available.made("attention", keys.dtype.name, keys.shape[3], softcap is not None)
