"""The kernels for few rows with more processors and dtypes than in `tests/core`."""

import pytest
from coded_rows import CASES, IN_BYTES, check, check_rounded
from few_rows import check_loaded, check_other_processor

from specjax.kernels import available


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


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("case", CASES[1::2], ids=str)
def test_products_with_codes_are_right_and_their_bits_do_not_depend_on_the_rows(
    monkeypatch, case, tiles
):
    if not tiles:
        monkeypatch.setattr(available, "tiles", lambda: False)
    check(case, tuple(range(1, 16)))


@pytest.mark.parametrize("case", IN_BYTES[::2], ids=str)
def test_products_of_rounded_activations_are_right(case):
    check_rounded(case, tuple(range(1, 16)))
