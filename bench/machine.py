"""The limits of this machine: how fast it reads memory and multiplies matrices."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax.measure import median_seconds


@functools.cache
def ceilings(rounds: int = 7) -> dict[str, float]:
    """`bandwidth` in GB/s, and `float32` and `bfloat16` matrix products in GFLOP/s; medians."""
    rates = {"bandwidth": max(bandwidths(rounds).values())}
    size = 2048 if _on_cpu() else 8192
    for name in ("float32", "bfloat16"):
        a = jnp.ones((size, size), name)
        product = jax.jit(lambda x: jnp.dot(x, x, preferred_element_type=jnp.float32))
        seconds = median_seconds(functools.partial(product, a), rounds)
        rates[name] = 2 * size**3 / seconds / 1e9
    return rates


def bandwidths(rounds: int = 7) -> dict[str, float]:
    """GB/s of several ways to read memory.

    A CPU reads 256 MiB, more than its caches hold; an accelerator reads 4 GiB, so that the time to
    launch a call does not matter.
    """
    words = 1 << (26 if _on_cpu() else 30)
    rates: dict[str, float] = {}
    for name, shape, read in (
        ("sums of long rows", (64, words // 64), lambda x: x.sum(axis=1)),
        ("sums of short rows", (words // 1024, 1024), lambda x: x.sum(axis=1)),
        ("greatest of short rows", (words // 1024, 1024), lambda x: x.max(axis=1)),
        ("vector times wide matrix", (4096, words // 4096), lambda x: jnp.ones(4096) @ x),
        ("five vectors times matrix", (8192, words // 8192), lambda x: jnp.ones((5, 8192)) @ x),
    ):
        array = jnp.ones(shape, jnp.float32)
        seconds = median_seconds(functools.partial(jax.jit(read), array), rounds)
        rates[name] = array.nbytes / seconds / 1e9
    return rates


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"
