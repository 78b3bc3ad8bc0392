"""The kernel of random bits: those of JAX, in one call, and where JAX is asked instead."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import kernels, sampling
from specjax.kernels import available

# Sizes around those of vectors, and one that two threads share.
SIZES = 1, 15, 16, 17, 4096, 40_003


def test_the_bits_are_those_of_jax():
    keys = jax.random.split(jax.random.key(7), 3)
    for size in SIZES:
        assert kernels.takes_random_bits(size)
        expected = jax.vmap(lambda key, size=size: jax.random.bits(key, (size,)))(keys)
        np.testing.assert_array_equal(
            kernels.random_bits(jax.random.key_data(keys), size), expected
        )


def test_the_noise_is_that_of_jax_bit_for_bit_in_one_call_under_vmap():
    keys = jax.random.split(jax.random.key(3), (2, 3))

    def drawn(keys):
        return jax.vmap(jax.vmap(lambda key: sampling._gumbel(key, 513)))(keys)

    def of_jax(key):
        return jax.random.gumbel(key, (513,), jnp.float32, mode="low")

    np.testing.assert_array_equal(jax.jit(drawn)(keys), jax.jit(jax.vmap(jax.vmap(of_jax)))(keys))
    text = jax.jit(drawn).lower(keys).as_text()
    assert text.count("@specjax_random_bits_uint32(") == 1


@pytest.mark.parametrize("reason", ["no kernel", "another order of counters", "other keys"])
def test_jax_draws_where_the_kernel_cannot(reason: str, monkeypatch: pytest.MonkeyPatch):
    if reason == "no kernel":
        monkeypatch.setattr(available, "usable", lambda: False)
        available.made.cache_clear()
    try:
        with jax.threefry_partitionable(reason != "another order of counters"):
            key = jax.random.key(5, impl="rbg" if reason == "other keys" else "threefry2x32")
            expected = jax.random.gumbel(key, (100,), jnp.float32, mode="low")
            text = jax.jit(lambda key: sampling._gumbel(key, 100)).lower(key).as_text()
            assert "specjax_random_bits" not in text
            np.testing.assert_array_equal(sampling._gumbel(key, 100), expected)
    finally:
        available.made.cache_clear()
