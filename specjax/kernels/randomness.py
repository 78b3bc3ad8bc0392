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


def random_bits(keys: Array, size: int) -> Array:
    """Returns the bits that `jax.random.bits` makes of each key, in a program for one CPU.

    Args:
      keys: [N, 2] uint32, the data of keys of the implementation "threefry2x32".
      size: V, the numbers of each key.

    Returns:
      [N, V] uint32.
    """
    target = _made()
    if target is None:
        raise ValueError("no kernel for random bits on this CPU; ask `takes_random_bits` first")
    shape = jax.ShapeDtypeStruct((len(keys), size), jnp.uint32)
    return jax.ffi.ffi_call(target, shape)(keys)


def _made() -> str | None:
    return available.made("random_bits", "uint32")
