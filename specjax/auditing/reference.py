"""The reference: the target reads whole texts anew, without a KV cache, in batches of its own.

    decoder      prompt | t1 t2 | t3 | ...      passes over a few nodes, a cache, one row a text
    reference    prompt   t1 t2   t3   ...      one pass over each whole text, rows in random order

The decoder's text is judged as it is (*teacher forcing*): after each prefix of it the reference has
the logits, processes them in NumPy, and says which token had to follow.  So one wrong token does
not spoil the rest of the text, and a near tie can be told from an error.

The last bits of two programs differ.  `Rounding` says how far two logits may be apart for that
reason.  It is measured, and it cannot exceed what the number format explains.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.contract import ArrayTree, Model
from specjax.parallel import to_host

_NUMBERS = 1 << 26
"""The most logits that one pass of the reference makes: 256 MB in float32."""


@dataclasses.dataclass(frozen=True)
class Rounding:
    """The largest change of a logit by rounding."""

    slack: float  # logits within it are equal up to rounding
    typical: float  # the root of the mean square

    @classmethod
    def measure(cls, logits: np.ndarray, others: Sequence[np.ndarray], eps: float) -> Rounding:
        """Measures rounding by logits [R, V] of the reference and of other programs.

        Args:
          eps: of the coarsest number format of the target.
        """
        real = np.where(np.isfinite(logits), logits, 0.0)
        most, size = float(np.abs(real).max()), float(np.sqrt((real**2).mean()))
        apart = np.stack([np.where(np.isfinite(logits), other - logits, 0.0) for other in others])
        cap = 16 * eps * max(size, 1.0)
        least = 16 * float(np.finfo(np.float32).eps) * max(most, 1.0)
        typical = float(np.sqrt(np.mean(apart**2)))
        return cls(max(least, min(4 * float(np.abs(apart).max()), cap)), min(typical, cap / 4))


def precision(params: object, cache: object) -> float:
    """Returns the eps of the coarsest floating-point format among the arrays.

    A TPU or a GPU may multiply float32 matrices in bfloat16, so there it is at least that format's.
    """
    leaves = [x for x in jax.tree.leaves((params, cache)) if jnp.issubdtype(x.dtype, jnp.floating)]
    eps = max((float(jnp.finfo(x.dtype).eps) for x in leaves), default=0.0)
    platforms = {d.platform for x in leaves if isinstance(x, jax.Array) for d in x.devices()}
    return eps if platforms <= {"cpu"} else max(eps, float(jnp.finfo(jnp.bfloat16).eps))


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads whole texts with a model.

    Attributes:
      model, params: the target, or a draft model.
      rows: the decoder's, from which the reference takes another number for its own batches.
      seed: of the order of the texts.
    """

    model: Model
    params: ArrayTree
    rows: int
    seed: int = 0

    def after(
        self, texts: Sequence[Sequence[int]], width: int, last: int = 1, taps: tuple[int, ...] = ()
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
        """Yields the logits after the last tokens of each text, batch by batch.

        Args:
          texts: token ids, each with at most `width` tokens.
          width: the tokens to which texts are padded; another width is another compilation.
          last: K; the logits after the K last tokens.
          taps: layers whose outputs are returned too.

        Yields:
          The numbers [R] of the texts of a batch; the logits [R, K, V] float32 after their K last
          tokens (a text with fewer tokens repeats those after its first); with taps, the hidden
          states and then the features [R, W, E + sum E], otherwise None.
        """
        size = max(1, min(self.rows // 2 + 1, _NUMBERS // (width * self.model.vocab_size)))
        order = np.random.default_rng(self.seed).permutation(len(texts))
        for start in range(0, len(texts), size):
            chosen = order[start : start + size]
            tokens = np.zeros((size, width), np.int32)
            at = np.zeros((size, last), np.int32)
            for row, text in enumerate(chosen):
                tokens[row, : len(texts[text])] = texts[text]
                at[row] = np.maximum(len(texts[text]) - last + np.arange(last), 0)
            logits, seen = to_host(_read(self.model, taps, self.params, tokens, at))
            yield chosen, logits[: len(chosen)], None if seen is None else seen[: len(chosen)]

    def all_after(self, texts: Sequence[Sequence[int]], width: int) -> np.ndarray:
        """Returns the logits [M, V] after each whole text."""
        made = np.zeros((len(texts), self.model.vocab_size), np.float32)
        for chosen, logits, _ in self.after(texts, width):
            made[chosen] = logits[:, 0]
        return made


@functools.partial(jax.jit, static_argnums=(0, 1))
def _read(
    model: Model, taps: tuple[int, ...], params: ArrayTree, tokens: Array, at: Array
) -> tuple[Array, Array | None]:
    """Returns the logits [R, K, V] after tokens `at` of texts [R, W], from one pass."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    out = model.apply(params, tokens, positions, taps=taps)
    logits = jnp.take_along_axis(out.logits, at[..., None], axis=1).astype(jnp.float32)
    if not taps:
        return logits, None
    assert out.features is not None  # since there are taps
    return logits, jnp.concatenate([out.hidden, out.features], axis=-1).astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=2)
def _gumbel(key: Array, at: Array, size: int) -> Array:
    """Returns [M, V] the noise of the tokens at positions `at` [M] with the keys `key` [M].

    It is the definition of `match`: the token at position t is argmax(logits + g_t), and g_t is
    drawn with the row's key and t folded into it.
    """

    def one(key: Array, at: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(key, at), (size,), jnp.float32, mode="low")

    return jax.vmap(one)(key, at)


def noise(key: Array, at: np.ndarray, size: int) -> np.ndarray:
    """Returns [M, V], as `_gumbel`, for any M without a compilation for each."""
    part = max(1, min(1024, (1 << 24) // size))
    short = -len(at) % part
    keys = np.pad(np.asarray(jax.random.key_data(key)), ((0, short), (0, 0)))
    places, implementation = np.pad(at, (0, short)), str(jax.random.key_impl(key))
    made = [
        np.asarray(
            _gumbel(
                jax.random.wrap_key_data(jnp.asarray(keys[n : n + part]), impl=implementation),
                places[n : n + part],
                size,
            )
        )
        for n in range(0, len(places), part)
    ]
    return np.concatenate(made)[: len(at)]
