"""Log-probabilities of the emitted tokens, taken from the pass that verified them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax._internal.platforms import on_cpu
from specjax.sampling import Drawn, top_k


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
    def measure(
        cls, logits: Array, judged: Array | Drawn, path: Array, tokens: Array, num_top: int
    ) -> Logprobs:
        """Returns the log-probabilities of tokens [B, T], each drawn after a node of `path` [B, T].

        `logits` [B, N, V] are those after each node; `judged` are the same after warping, or what
        was drawn from them.
        """

        def at_path(logits: Array, warped: Array, path: Array, tokens: Array) -> tuple[Array, ...]:
            at = path[..., None]
            both = (jnp.take_along_axis(x, at, axis=1) for x in (logits, warped))
            raw, warped = (jax.nn.log_softmax(x.astype(jnp.float32)) for x in both)

            def of(x: Array) -> Array:
                return jnp.take_along_axis(x, tokens[..., None], axis=2)[..., 0]

            top, top_ids = top_k(raw, num_top)
            return of(raw), of(warped), top_ids.astype(jnp.int32), top

        def at_nodes(logits: Array, warped: Array, path: Array, tokens: Array) -> tuple[Array, ...]:
            none = jnp.zeros((*tokens.shape, 0), jnp.float32)
            found = (_of_tokens(x.astype(jnp.float32), path, tokens) for x in (logits, warped))
            return *found, none.astype(jnp.int32), none

        if isinstance(judged, Drawn):
            raw, warped = judged.log_probabilities(logits, path, tokens)
            top, top_ids = top_k(jax.nn.log_softmax(logits.astype(jnp.float32)), num_top)
            at = path[..., None]
            top, top_ids = (jnp.take_along_axis(x, at, axis=1) for x in (top, top_ids))
            return cls(raw, warped, top_ids.astype(jnp.int32), top)
        # A gather along the path of a chain, which has all nodes, would copy all logits.
        if num_top == 0 and logits.shape[1] <= path.shape[1]:
            return cls(*on_cpu(at_nodes, at_path, logits, judged, path, tokens))
        return cls(*at_path(logits, judged, path, tokens))

    def row(self, index: int, start: int, count: int) -> Logprobs:
        """Returns slots `start` to `start + count` of a row, as NumPy arrays without the axis B."""

        def cut(leaf: Array) -> np.ndarray:
            return np.asarray(leaf[index, start : start + count])

        return jax.tree.map(cut, self)


def _of_tokens(x: Array, path: Array, tokens: Array) -> Array:
    """Returns what `jax.nn.log_softmax` of x [B, N, V] has for tokens [B, T] after nodes [B, T]."""
    most = x.max(-1)
    total = jnp.log(jnp.exp(x - most[..., None]).sum(-1))
    of_path = jax.vmap(lambda x, most, total, n, t: (x[n, t] - most[n]) - total[n])
    return of_path(x, most, total, path, tokens)
