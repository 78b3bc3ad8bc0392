"""Sampling settings as numbers per row, what they make of logits, and the noise that draws a token.

A token is drawn as argmax(warp(logits) + Gumbel noise), which is an exact sample of softmax(warp(logits)).  Greedy is
the limit of temperature 0 and no other code path: warp leaves one token, whatever the noise.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax.arguments import is_count, per_row

_PROPOSE, _ACCEPT, _RESIDUAL = 0, 1, 2

_IMPLEMENTATION = "threefry2x32"

_LEAST_TEMPERATURE = 1e-20
"""Logits up to 3e18 stay finite when they are divided by it.  Only logits that are equal, or within
1e-18 of each other, are still chosen between by the noise."""


@struct.dataclass
class Sampling:
    """One number a row, so that a new value never compiles and requests of several kinds share a batch."""

    temperature: Array  # [B] float32; 0 is greedy; what lies between 0 and 1e-20 counts as 1e-20
    top_k: Array  # [B] int32; 0 keeps all
    top_p: Array  # [B] float32; 1 keeps all, and the best token is always kept
    min_p: Array  # [B] float32; 0 keeps all

    @classmethod
    def create(
        cls, batch: int, temperature: Any = 1.0, top_k: Any = 0, top_p: Any = 1.0, min_p: Any = 0.0
    ) -> Sampling:
        """Settings for `batch` rows, each a number for all of them or a sequence of one a row.

        Raises:
          ValueError: a value outside its range.
        """

        made = (
            per_row(
                "temperature",
                temperature,
                batch,
                np.float32,
                lambda v: v >= 0,
                "0 (greedy) or greater",
            ),
            per_row(
                "top_k", top_k, batch, np.int32, is_count, "a whole number, 0 (off) or greater"
            ),
            per_row(
                "top_p",
                top_p,
                batch,
                np.float32,
                lambda v: 0 < v <= 1,
                "in (0, 1]; 1 switches it off",
            ),
            per_row(
                "min_p",
                min_p,
                batch,
                np.float32,
                lambda v: 0 <= v <= 1,
                "in [0, 1]; 0 switches it off",
            ),
        )
        return cls(*map(jnp.asarray, made))


def make_key(seed: int | Array | np.ndarray) -> Array:
    """A PRNG key of `seed` for decoding, whatever `jax_default_prng_impl` says.

    Under `vmap` JAX's "rbg" draws the numbers of all rows from the first key alone.  With
    "threefry2x32" the noise of a row depends on its own key alone, as every exact rule requires.
    """
    return jax.random.key(seed, impl=_IMPLEMENTATION)


def keys_of_rows(key: Any, rows: int) -> Array:
    """`key` as [rows] typed keys.

    Raw keys of `jax.random.PRNGKey`, [rows, 2] uint32, are wrapped: they give the same numbers.

    Raises:
      ValueError: keys of another implementation than "threefry2x32", or of another shape (of traced
        ones too).
    """
    cure = f"pass jax.random.split(specjax.make_key(seed), {rows})"
    if not isinstance(key, jax.Array | np.ndarray):
        raise ValueError(f"key is a {type(key).__name__}; {cure}")
    if key.dtype == np.uint32 and key.shape == (rows, 2):
        return jax.random.wrap_key_data(jnp.asarray(key), impl=_IMPLEMENTATION)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise ValueError(f"key is {key.dtype}{list(key.shape)}, and not {rows} PRNG keys; {cure}")
    if (found := str(jax.random.key_impl(key))) != _IMPLEMENTATION:
        raise ValueError(
            f'key has the implementation "{found}", with which a text would depend on the rows '
            f'beside it; decoding takes "{_IMPLEMENTATION}": {cure}'
        )
    if key.shape != (rows,):
        raise ValueError(f"key has the shape {key.shape} for {rows} rows; {cure}")
    return jnp.asarray(key)


def argmax(x: Array) -> Array:
    """Index of the first maximum along the last axis, int32.

    The maximum, then the smallest index that equals it: two passes that XLA:CPU vectorises, unlike jnp.argmax.
    """
    index = jnp.arange(x.shape[-1], dtype=jnp.int32)
    return jnp.min(jnp.where(x == x.max(-1, keepdims=True), index, x.shape[-1] - 1), axis=-1)


def warp(logits: Array, sampling: Sampling) -> Array:
    """Logits [B, N, V] -> float32 logits of the distribution that is sampled, -inf for what is left out.

    In the order of transformers: temperature, top-k, top-p, min-p.  Tokens that tie with the last one kept are kept.
    """

    def rows(x):
        return x[:, None, None]

    greedy = rows(sampling.temperature == 0)
    temperature = jnp.maximum(sampling.temperature, _LEAST_TEMPERATURE)
    divisor = jnp.where(sampling.temperature == 0, 1.0, temperature)
    scaled = logits.astype(jnp.float32) / rows(divisor)
    filtering = (sampling.temperature > 0) & (
        (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    )

    def keep_top_k(x):
        size = x.shape[-1]
        top_k = rows(jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, size), size))
        return jnp.where(
            _largest(x, lambda kept: kept.sum(-1, keepdims=True) >= top_k), x, -jnp.inf
        )

    def keep_top_p(x):
        # Many devices take a subnormal number for 0, which the sum over no token at all reaches.
        least = jnp.finfo(jnp.float32).tiny
        probs, top_p = jax.nn.softmax(x), rows(jnp.maximum(sampling.top_p, least))
        kept = _largest(x, lambda kept: jnp.where(kept, probs, 0).sum(-1, keepdims=True) >= top_p)
        return jnp.where(kept | (top_p >= 1), x, -jnp.inf)

    def keep_min_p(x):
        floor = x.max(-1, keepdims=True) + jnp.log(rows(sampling.min_p))
        return jnp.where(x >= floor, x, -jnp.inf)

    def filtered(x):
        for on, keep in ((sampling.top_k > 0, keep_top_k), (sampling.top_p < 1, keep_top_p)):
            x = jax.lax.cond(on.any(), keep, lambda x: x, x)
        return keep_min_p(x)

    scaled = jax.lax.cond(filtering.any(), filtered, lambda x: x, scaled)
    best = jnp.arange(logits.shape[-1]) == argmax(logits)[..., None]
    return jnp.where(greedy, jnp.where(best, 0.0, -jnp.inf), scaled)


def scores(logits: Array, warped: Array, noise: Array | float) -> Array:
    """What siblings are chosen by, greatest first, [..., V]: warped + noise, and below them the rest by `logits`.

    So a row of temperature 0 has runners-up, and siblings are distinct where fewer tokens are left than wanted.
    """
    kept = warped > -jnp.inf
    drawn = warped + noise

    def lowest(x):
        return jnp.where(kept, x, jnp.inf).min(-1, keepdims=True)

    return jnp.where(kept, drawn, lowest(drawn) + jnp.minimum(logits - lowest(logits), 0))


def _largest(x: Array, enough: Any) -> Array:
    """The mask of the smallest set {x >= t} for which `enough(mask)` [..., 1] holds; everything if none does.

    Bisection over the 32 bits of t, 32 passes over x: on a CPU 15 to 30 times as fast as sorting, for vocabularies of
    32 and 152 thousand (`bench/sampler.py`).
    """
    bits = jax.lax.bitcast_convert_type(x + 0.0, jnp.uint32)  # + 0.0: the two zeros are one value
    order = jnp.where(
        bits >> 31, ~bits, bits | jnp.uint32(1 << 31)
    )  # as unsigned integers in the order of the floats

    def bit(i, threshold):
        candidate = threshold | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(enough(order >= candidate), candidate, threshold)

    threshold = jax.lax.fori_loop(0, 32, bit, jnp.zeros((*x.shape[:-1], 1), jnp.uint32))
    return order >= threshold


def _gumbel(key: Array, size: int) -> Array:
    return jax.random.gumbel(
        key, (size,), jnp.float32
    )  # float32 under x64 too: the same key, the same tokens


@struct.dataclass
class SharedDraw:
    """Noise keyed by row and absolute position, the same for proposer and rule: what one draws, the other draws too.

    With it the text of a row depends on its key alone (Daliri, Musco, Suresh 2024, arXiv 2408.07978).
    """

    gumbel: Array  # [B, D + 1, V]; for the token after a node of depth d

    @classmethod
    def create(
        cls, key: Array, position: Array, max_depth: int, size: int, sampled: Array
    ) -> SharedDraw:
        """`position` [B] is the root's; `sampled` [] says whether any row needs noise at all."""

        def noise():
            steps = jnp.arange(1, max_depth + 2)
            row = jax.vmap(lambda k, t: _gumbel(jax.random.fold_in(k, t), size), (None, 0))
            return jax.vmap(lambda k, p: row(k, p + steps))(key, position)

        empty = jnp.zeros((key.shape[0], max_depth + 1, size), jnp.float32)
        return cls(jax.lax.cond(sampled, noise, lambda: empty))

    def noise(self, node: Array, depth: Array) -> Array:
        """One row: [M, V], for the children of nodes at `depth` [M]."""
        del node
        return self.gumbel[depth]

    def acceptance(self, num_nodes: int) -> Array:
        raise TypeError("rules with shared noise draw no acceptances: say shared_noise = False")

    def residual(self) -> Array:
        raise TypeError("rules with shared noise draw no residual: say shared_noise = False")


@struct.dataclass
class IndependentDraw:
    """Separate streams for the proposer's draws, the acceptance draws and the residual draw of one step."""

    key: (
        Array  # [B] of row and position: a step has its own, since every step moves the position on
    )
    size: int = struct.field(pytree_node=False)

    @classmethod
    def create(cls, key: Array, position: Array, size: int) -> IndependentDraw:
        return cls(jax.vmap(jax.random.fold_in)(key, position), size)

    def _stream(self, stream: int) -> Array:
        return jax.random.fold_in(self.key, stream)

    def noise(self, node: Array, depth: Array) -> Array:
        """One row: Gumbel [M, V] that the children of the nodes `node` [M] are drawn with."""
        del depth
        stream = self._stream(_PROPOSE)
        return jax.vmap(lambda n: _gumbel(jax.random.fold_in(stream, n), self.size))(node)

    def acceptance(self, num_nodes: int) -> Array:
        """One row: uniform [N] in [0, 1)."""
        return jax.random.uniform(self._stream(_ACCEPT), (num_nodes,), jnp.float32)

    def residual(self) -> Array:
        """One row: Gumbel [V] for the residual or bonus token."""
        return _gumbel(self._stream(_RESIDUAL), self.size)
