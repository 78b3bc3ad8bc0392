"""The kernels for few rows with more processors and dtypes than in `tests/core/test_kernels.py`."""

import pytest
from few_rows import check_loaded, check_other_processor


@pytest.mark.parametrize(
    ("dtype", "lanes", "registers"),
    [
        *(("bfloat16", *machine) for machine in ((4, 32), (8, 16))),
        *(("int8", *machine) for machine in ((8, 16), (16, 32))),
    ],
)
def test_the_loops_for_other_processors_are_right(monkeypatch, dtype, lanes, registers):
    check_other_processor(monkeypatch, dtype, lanes, registers)


@pytest.mark.parametrize(("dtype", "int8"), [("float32", False), ("bfloat16", True)])
def test_a_loaded_model_multiplies_few_rows_with_the_kernels(dtype, int8):
    check_loaded(dtype, int8)
