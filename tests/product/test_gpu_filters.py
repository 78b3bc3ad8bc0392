"""The kernels for filters on a GPU, computed on this machine: which tokens they keep, and bits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import kernels

pytestmark = pytest.mark.xdist_group("gpu filters")  # a share takes all of them, or none

SETTINGS = [  # top_k, top_p, min_p: of one row each
    (0, 1.0, 0.0),
    (5, 1.0, 0.1),
    (50, 0.7, 0.0),
    (0, 0.9, 0.02),
    (1, 0.5, 0.5),
    (10**6, 1e-42, 0.0),
]


@functools.cache
def kernel():
    return jax.jit(functools.partial(kernels.least_kept_on_gpu, interpret=True))


def rows(size: int) -> jax.Array:
    """Logits of two nodes of each row, with ties, both zeros, and tokens that nothing drafts."""
    drawn = 3 * np.random.default_rng(size).standard_normal((len(SETTINGS), 2, size), np.float32)
    drawn[:, 0, :9] = 2.5
    drawn[:, 1, 9:12] = -np.inf
    drawn[1] = np.where(np.arange(size) % 2, 0.0, -0.0)
    return jnp.asarray(drawn)


@pytest.mark.parametrize("size", [40, 2500])
def test_the_tokens_that_warp_keeps(size):
    """They are those of the form for other platforms; a row alone has the same bits."""
    logits = rows(size)
    top_k, top_p, min_p = (np.array(one) for one in zip(*SETTINGS, strict=True))
    sampling = specjax.Sampling.create(len(SETTINGS), 1.0, top_k, top_p, min_p)
    wanted = np.asarray(specjax.warp(logits, sampling))
    settings = sampling.top_k, sampling.top_p, sampling.min_p
    best = jnp.argmax(logits, axis=-1)
    least = kernel()(logits, best, *settings)
    assert least.shape == (*logits.shape[:2], 1)
    np.testing.assert_array_equal(np.where(logits < least, -np.inf, logits), wanted)
    row = slice(2, 3)
    alone = kernel()(logits[row], best[row], *(x[row] for x in settings))
    np.testing.assert_array_equal(np.asarray(alone), np.asarray(least)[row])


def test_it_is_in_programs_of_models_on_one_nvidia_gpu():
    sampling = specjax.Sampling.create(1, 0.7, 4)
    for triton in (True, False):
        warped = jax.jit(functools.partial(specjax.warp, triton=triton))
        traced = warped.trace(jnp.ones((1, 1, 64)), sampling)
        found = {
            platform: 'name = "filters"' in traced.lower(lowering_platforms=(platform,)).as_text()
            for platform in ("cuda", "rocm", "tpu", "cpu")
        }
        assert found == {"cuda": triton, "rocm": False, "tpu": False, "cpu": False}
