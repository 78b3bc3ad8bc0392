"""Tokens drawn from many rows of logits at once, as XLA would draw them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.kernels import available
from specjax.kernels.randomness import takes_random_bits


@struct.dataclass
class Draws:
    """A token of each row, and what its log-probabilities follow from."""

    token: Array  # [N] int32
    sure: Array  # [N] bool; False: it may not be the token that XLA draws
    most: Array  # [N] the greatest logit
    total: Array  # [N, 2] sums of exp(x - max x) of the logits, and of the warped ones


def takes_draws(size: int) -> bool:
    """Returns whether `draws` draws from so many tokens, as JAX is set up."""
    return takes_random_bits(size) and size < 2**31 and _made() is not None


def draws(
    logits: Array, keys: Array, folded: Array, temperature: Array, least: Array, sums: bool
) -> Draws:
    """Draws argmax(warped + Gumbel noise) of each row, in a program for one CPU.

    The warped logits are logits / temperature, but for logits below `least`.  At temperature 0 the
    greatest logit is drawn.  The noise is that of `jax.random.gumbel` in the mode "low", with keys
    into which numbers are folded.

    Args:
      logits: [N, V] float32.
      keys: [N, 2] uint32, the data of keys of the implementation "threefry2x32".
      folded: [N] uint32, the numbers.
      temperature: [N] float32, 0 or normal numbers.
      least: [N] float32, the least logit that is kept; -inf keeps all.
      sums: whether rows of temperature 0 have sums, too.
    """
    target = _made()
    if target is None:
        raise ValueError("no kernel for draws on this CPU; ask `takes_draws` first")
    wanted = jnp.full_like(temperature, sums)
    settings = jnp.stack([temperature, least, wanted], axis=1)
    shape = jax.ShapeDtypeStruct((len(logits), 5), jnp.float32)
    made = jax.ffi.ffi_call(target, shape)(logits, keys, folded[:, None], settings)
    whole = jax.lax.bitcast_convert_type(made[:, :2], jnp.int32)
    return Draws(whole[:, 0], whole[:, 1] != 0, made[:, 2], made[:, 3:])


def _made() -> str | None:
    return available.made("drawing", "float32")
