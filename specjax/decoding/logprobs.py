"""Log-probabilities of the emitted tokens, taken from the pass that verified them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax.sampling import top_k


@struct.dataclass
class Logprobs:
    """Log-probabilities for every slot of a token buffer: natural logarithms, float32.

    The result of `row` is about one row and has no leading B.
    """

    raw: Array  # [B, L] of the token under the target's own distribution, at temperature 1
    warped: Array  # [B, L] of the token under the sampled distribution: all settings and processors
    top_ids: Array  # [B, L, n] int32; the target's own most probable tokens, best first
    top: Array  # [B, L, n] log-probabilities of `top_ids`

    @classmethod
    def zeros(cls, batch: int, size: int, num_top: int) -> Logprobs:
        """Returns empty buffers for L = `size` slots and n = `num_top` tokens per slot."""
        one = jnp.zeros((batch, size), jnp.float32)
        top = jnp.zeros((batch, size, num_top), jnp.float32)
        return cls(one, one, top.astype(jnp.int32), top)

    @classmethod
    def measure(cls, logits: Array, warped: Array, tokens: Array, num_top: int) -> Logprobs:
        """Returns the log-probabilities of `tokens` [B, T].

        `logits` and `warped` [B, T, V] are those of the node after which each token was drawn.
        """
        raw, warped = jax.nn.log_softmax(logits.astype(jnp.float32)), jax.nn.log_softmax(warped)

        def of(x: Array) -> Array:
            return jnp.take_along_axis(x, tokens[..., None], axis=2)[..., 0]

        top, top_ids = top_k(raw, num_top)
        return cls(of(raw), of(warped), top_ids.astype(jnp.int32), top)

    def row(self, index: int, start: int, count: int) -> Logprobs:
        """Returns slots `start` to `start + count` of a row, as NumPy arrays without the axis B."""

        def cut(leaf: Array) -> np.ndarray:
            return np.asarray(leaf[index, start : start + count])

        return jax.tree.map(cut, self)
