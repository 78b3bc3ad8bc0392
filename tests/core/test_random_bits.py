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
    keys, numbers = jax.random.split(jax.random.key(7), 3), jnp.uint32([0, 5, 2**32 - 1])
    folded = jax.vmap(jax.random.fold_in)(keys, numbers)
    for size in SIZES:
        assert kernels.takes_random_bits(size)
        expected = jax.vmap(lambda key, size=size: jax.random.bits(key, (size,)))(folded)
        np.testing.assert_array_equal(
            kernels.random_bits(jax.random.key_data(keys), numbers, size), expected
        )


def test_the_noise_is_that_of_jax_bit_for_bit_in_one_call_under_vmap():
    keys, numbers = jax.random.split(jax.random.key(3), 2), jnp.array([0, 70, 9])

    def every(one):
        return jax.jit(jax.vmap(jax.vmap(one, (None, 0)), (0, None)))

    def of_jax(key, number):
        return jax.random.gumbel(jax.random.fold_in(key, number), (513,), jnp.float32, mode="low")

    drawn = every(lambda key, number: sampling._gumbel(key, number, 513))
    np.testing.assert_array_equal(drawn(keys, numbers), every(of_jax)(keys, numbers))
    text = drawn.lower(keys, numbers).as_text()
    assert text.count("@specjax_random_bits_uint32(") == 1


@pytest.mark.parametrize("reason", ["no kernel", "another order of counters", "other keys"])
def test_jax_draws_where_the_kernel_cannot(reason: str, monkeypatch: pytest.MonkeyPatch):
    if reason == "no kernel":
        monkeypatch.setattr(available, "usable", lambda: False)
        available.made.cache_clear()
    try:
        with jax.threefry_partitionable(reason != "another order of counters"):
            key = jax.random.key(5, impl="rbg" if reason == "other keys" else "threefry2x32")
            folded = jax.random.fold_in(key, 3)
            expected = jax.random.gumbel(folded, (100,), jnp.float32, mode="low")
            text = jax.jit(lambda key: sampling._gumbel(key, 3, 100)).lower(key).as_text()
            assert "specjax_random_bits" not in text
            np.testing.assert_array_equal(sampling._gumbel(key, 3, 100), expected)
    finally:
        available.made.cache_clear()
