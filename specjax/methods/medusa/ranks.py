"""Measures the ranks of tokens among the predictions of Medusa heads, to choose trees from."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from specjax.contract import CacheT, Model, ParamsT, Weights
from specjax.methods.medusa.network import MedusaHeads, medusa_hidden, medusa_logits
from specjax.parallel import to_host


def measure_ranks(
    model: Model[ParamsT, CacheT],
    params: ParamsT,
    heads: MedusaHeads,
    arrays: Weights,
    target_head: Array | None,
    tokens: ArrayLike,
) -> np.ndarray:
    """Ranks the next tokens among the predictions of each head, at every position of a text.

    Args:
      model, params: the target.
      heads, arrays: the heads, and their parameters.
      target_head: [E, V], the target's own (version 2), or None.
      tokens: [B, T] texts.  On texts that the target wrote, ranks measure acceptance; on other
        texts they measure accuracy.

    Returns:
      [B * (T - 1 - K), K] int32: row t holds the ranks of the tokens t + 2 ... t + 1 + K, where 0
      is the best prediction.
    """
    tokens = jnp.asarray(tokens, jnp.int32)
    if tokens.shape[1] < heads.num_heads + 2:
        raise ValueError(
            f"texts of {tokens.shape[1]} tokens; {heads.num_heads} heads need "
            f"{heads.num_heads + 2} or more"
        )
    return to_host(_ranks(model, heads, params, arrays, target_head, tokens)).reshape(
        -1, heads.num_heads
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _ranks(
    model: Model[ParamsT, CacheT],
    heads: MedusaHeads,
    params: ParamsT,
    arrays: Weights,
    target_head: Array | None,
    tokens: Array,
) -> Array:
    rows, width = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width), (rows, width))
    start = jnp.arange(width - 1 - heads.num_heads)[:, None]
    hidden = model.apply(params, tokens, positions).hidden[:, : len(start)]

    def row(xs: tuple[Array, Array]) -> Array:
        hidden, text = xs
        logits = medusa_logits(heads, medusa_hidden(heads, arrays, hidden), target_head)
        label = text[start + 2 + jnp.arange(heads.num_heads)][..., None]
        own = jnp.take_along_axis(logits, label, axis=-1)
        before = (logits > own) | ((logits == own) & (jnp.arange(logits.shape[-1]) < label))
        return before.sum(-1, dtype=jnp.int32)

    # Row by row, since the logits of all rows would take too much memory.
    return jax.lax.map(row, (hidden, tokens))
