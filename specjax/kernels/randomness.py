"""Random bits of many keys at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from specjax.kernels import available

_COUNTERS = 2**32


def takes_random_bits(size: int) -> bool:
    """Returns whether `random_bits` makes so many numbers of a key, as JAX is set up."""
    return (
        0 < size < _COUNTERS
        # The other way counts in another order.
        and getattr(jax.config, "jax_threefry_partitionable", False)
        and _made() is not None
    )


def random_bits(keys: Array, folded: Array, size: int) -> Array:
    """Returns the bits that JAX makes of keys with a number folded in, in a program for one CPU.

    They are those of `jax.random.bits(jax.random.fold_in(key, number), (size,))`.

    Args:
      keys: [N, 2] uint32, the data of keys of the implementation "threefry2x32".
      folded: [N] uint32, the numbers.
      size: V, the numbers of each key.

    Returns:
      [N, V] uint32.
    """
    target = _made()
    if target is None:
        raise ValueError("no kernel for random bits on this CPU; ask `takes_random_bits` first")
    shape = jax.ShapeDtypeStruct((len(keys), size), jnp.uint32)
    return jax.ffi.ffi_call(target, shape)(keys, folded[:, None])


def _made() -> str | None:
    return available.made("random_bits", "uint32")
