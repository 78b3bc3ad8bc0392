"""Log-probabilities of the emitted tokens, read off the pass that verified them: no second pass."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array


@struct.dataclass
class Logprobs:
    """Of every slot of a token buffer; natural logarithms, float32.  Without the leading B: those of one row."""

    raw: Array  # [B, L] of the token under the target's own distribution, at temperature 1
    warped: Array  # [B, L] of the token under the distribution that was sampled: all settings and processors
    top_ids: Array  # [B, L, n] int32; the most probable tokens of the target's own distribution, best first
    top: Array  # [B, L, n] and their log-probabilities

    @classmethod
    def zeros(cls, batch: int, size: int, num_top: int) -> Logprobs:
        one, top = (
            jnp.zeros((batch, size), jnp.float32),
            jnp.zeros((batch, size, num_top), jnp.float32),
        )
        return cls(one, one, top.astype(jnp.int32), top)

    @classmethod
    def measure(cls, logits: Array, warped: Array, tokens: Array, num_top: int) -> Logprobs:
        """Of `tokens` [B, T], each drawn after the node whose raw and warped logits [B, T, V] are given."""
        raw, warped = jax.nn.log_softmax(logits.astype(jnp.float32)), jax.nn.log_softmax(warped)

        def of(x):
            return jnp.take_along_axis(x, tokens[..., None], axis=2)[..., 0]

        top, top_ids = jax.lax.top_k(raw, num_top)
        return cls(of(raw), of(warped), top_ids.astype(jnp.int32), top)

    def row(self, index: int, start: int, count: int) -> Logprobs:
        """On the host: `count` slots of a row from `start` on, as numpy arrays without the leading B."""

        def cut(leaf: Any) -> Any:
            return np.asarray(leaf[index, start : start + count])

        return jax.tree.map(cut, self)
