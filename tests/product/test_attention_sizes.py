"""The kernel for attention of few tokens with more sizes of heads, dtypes and processors than in
`tests/core/test_attention_kernel.py`."""

import pytest
from attention_kernels import (
    LOOPS,
    SHAPES,
    check_gradient,
    check_loaded,
    check_numbers,
    check_other_processor,
    check_step,
)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, "float32") for shape in SHAPES if shape[4] in (32, 64, 128, 300)),
        *((shape, "bfloat16") for shape in SHAPES if shape[4] not in LOOPS),
    ],
)
def test_numbers_are_those_of_float64(shape, dtype):
    check_numbers(shape, dtype)


@pytest.mark.parametrize("lanes, registers", [(4, 32), (8, 16), (16, 32)])
def test_the_loops_for_other_processors_are_right(monkeypatch, lanes, registers):
    check_other_processor(monkeypatch, "bfloat16", lanes, registers)


@pytest.mark.parametrize(("slots", "softcap"), [(1100, 3.0), (23, None)])
def test_the_gradient_is_that_without_the_kernel(slots, softcap):
    check_gradient(slots, softcap)


@pytest.mark.parametrize(("dtype", "width"), [("float32", 5), ("bfloat16", 1)])
def test_a_step_of_one_row_neither_copies_nor_converts_its_cache(dtype, width):
    check_step(dtype, width)


def test_a_loaded_model_attends_with_the_kernel():
    check_loaded("bfloat16", int8=False)
