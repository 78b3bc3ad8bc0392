"""The kernel that rounds rows to int8: the bits of XLA's products, for any number of rows."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from specjax import kernels
from specjax.kernels import available, calling
from specjax.kernels.coding import ROUNDED_ROWS
from specjax.kernels.forms import Machine
from specjax.kernels.shorts import Shorts
from specjax.models import Int8, cpu_int8_dot_general, int8_dot_general

# Inputs above, below and between vectors; outputs that are no multiple of what is multiplied at
# once; and a matrix that two threads share.
SHAPES = (16, 1), (48, 33), (256, 688), (688, 256), (512, 4099)
ROWS = 1, 2, 3, 5, 11, 48

MACHINES = None, Machine(8, 16), Machine(4, 32)
"""This processor, and others without VNNI."""


@functools.cache
def shorts(machine: Machine) -> str:
    """Registers the product of another processor."""
    return calling.register(Shorts(ROUNDED_ROWS, machine), f"specjax_test_shorts_{machine.name}")


def multiply(product, x, matrix):
    return product(x, matrix.unbox(), (((x.ndim - 1,), (0,)), ((), ())))


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("inner, outer", SHAPES)
def test_the_bits_are_those_of_xla(
    monkeypatch: pytest.MonkeyPatch, inner: int, outer: int, machine: Machine | None
):
    name = ROUNDED_ROWS.name
    if machine is not None:
        name = shorts(machine)
        monkeypatch.setattr(available, "made", lambda *of: name)
    keys = jax.random.split(jax.random.key(inner))
    matrix = Int8.quantise(jax.random.normal(keys[0], (inner, outer)))
    x = jax.random.normal(keys[1], (1, max(ROWS), inner))
    x = x.at[:, 1].set(0).at[:, 2].mul(1e-30).at[:, 3, 0].mul(1e30)  # rows with other steps
    expected = jax.jit(lambda x: multiply(int8_dot_general, x, matrix))(x)
    ours = jax.jit(lambda x: [multiply(cpu_int8_dot_general, x[:, :n], matrix) for n in ROWS])
    assert ours.lower(x).as_text().count(f"@{name}(") == len(ROWS)
    for rows, found in zip(ROWS, ours(x), strict=True):
        np.testing.assert_array_equal(found, expected[:, :rows])


def test_a_gradient_is_that_of_xla():
    """Through a rounded matrix only the step of a row has one, as it has without the kernel."""
    matrix = Int8.quantise(jax.random.normal(jax.random.key(0), (48, 33)))
    x = jax.random.normal(jax.random.key(1), (2, 48))
    ours, theirs = (
        jax.jit(jax.grad(lambda x, product=product: multiply(product, x, matrix).sum()))(x)
        for product in (cpu_int8_dot_general, int8_dot_general)
    )
    assert np.any(theirs)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_xla_rounds_rows_whose_inputs_the_kernel_does_not_take():
    matrix = Int8.quantise(jax.random.normal(jax.random.key(0), (40, 24)))
    x = jax.random.normal(jax.random.key(1), (3, 40))
    assert not kernels.takes_rounded(3, matrix.values)
    expected = multiply(int8_dot_general, x, matrix)
    np.testing.assert_array_equal(multiply(cpu_int8_dot_general, x, matrix), expected)
