"""The kernels for few rows beside float64 and beside XLA: checks of one case each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import kernels
from specjax.kernels import available, calling
from specjax.kernels.coding import ROUNDED_ROWS
from specjax.kernels.columns import product_of
from specjax.kernels.forms import FORMS, Machine
from specjax.models import for_several_devices

SUMMED = {"float32": 0, "bfloat16": 1, "int8": 1}


def drawn(dtype: str, inner: int, outer: int) -> tuple[np.ndarray, np.ndarray]:
    """130 rows of activations, and a matrix."""
    rng = np.random.default_rng(inner * 10007 + outer)
    shape = (inner, outer) if SUMMED[dtype] == 0 else (outer, inner)
    if dtype == "int8":
        values = [rng.integers(-127, 128, s) for s in ((130, inner), shape)]
    else:
        values = [rng.normal(size=s) for s in ((130, inner), shape)]
    x, weights = (value.astype(np.float32).astype(jnp.dtype(dtype)) for value in values)
    return x, weights


def check_other_processor(monkeypatch: pytest.MonkeyPatch, dtype: str, lanes: int, registers: int):
    """Their vectors are cut into those of this one; a row's bits do not depend on the others."""
    if Machine(lanes, registers) == calling.machine():
        return  # other tests run these
    work = product_of(FORMS[dtype], Machine(lanes, registers))
    target = calling.register(work, f"specjax_test_{lanes}_{registers}_{dtype}")
    monkeypatch.setattr(available, "made", lambda *of: target)
    product = jax.jit(lambda x, w: kernels.few_rows(x, w, SUMMED[dtype]))
    for inner, outer in (75, 53), (700, 1100):
        x, weights = drawn(dtype, inner, outer)
        exact = np.asarray(weights, np.float64)
        exact = np.asarray(x, np.float64) @ (exact if SUMMED[dtype] == 0 else exact.T)
        made = np.asarray(product(x, weights))
        np.testing.assert_allclose(made, exact, rtol=0, atol=0 if dtype == "int8" else 2e-6 * inner)
        for rows in (1, 6, 7):
            assert np.asarray(product(x[:rows], weights)).tobytes() == made[:rows].tobytes()


def check_loaded(dtype: str, int8: bool):
    target = specjax.load(specjax.shipped("tiny/target"), dtype)
    target = specjax.quantise(target) if int8 else target
    other = for_several_devices(target)
    assert other.model != target.model
    tokens = jnp.asarray([[5, 6, 7]])
    run = [
        jax.jit(lambda p, m=m: m.model.apply(p, tokens, jnp.arange(3)[None]).logits)
        for m in (target, other)
    ]
    texts = [f.lower(target.params).as_text() for f in run]
    kernel = "specjax_few_rows_"
    if int8 and kernels.takes_rounded(3, jnp.zeros((16, 16), jnp.int8)):
        kernel = ROUNDED_ROWS.name
    assert kernel in texts[0] and "specjax_few_rows_" not in texts[1] and kernel not in texts[1]
    ours, theirs = (np.asarray(f(target.params), np.float32) for f in run)
    np.testing.assert_allclose(ours, theirs, atol=1e-5 if dtype == "float32" else 0.1)
