"""Running sums and products are those of numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax._internal.prefix_sums import leading, running_product, running_sum

SUM, PRODUCT, LEADING = map(jax.jit, (running_sum, running_product, leading))


@pytest.mark.parametrize("shape", [(1,), (5,), (3, 8), (2, 3, 33)])
def test_they_are_those_of_numpy(shape):
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape).astype(np.float32)
    np.testing.assert_allclose(SUM(x), np.cumsum(x, -1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(PRODUCT(x), np.cumprod(x, -1), rtol=1e-4)
    whole = rng.integers(-9, 9, shape).astype(np.int32)
    found = SUM(whole)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, np.cumsum(whole, -1))
    true = rng.random(shape) < 0.8
    np.testing.assert_array_equal(LEADING(true), np.cumprod(true, -1) > 0)
