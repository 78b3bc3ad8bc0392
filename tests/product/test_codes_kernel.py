"""The kernels for few rows and codes with scales: numbers, bits, and where they are not used."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coded_rows import (
    CASES,
    IN_BYTES,
    Case,
    check,
    check_rounded,
    coding,
    drawn,
    has_kernel,
    in_8_bits,
)

from specjax import kernels
from specjax.kernels import available, calling
from specjax.kernels.codes import MANY, Codes
from specjax.kernels.digits import Digits
from specjax.kernels.forms import Machine
from specjax.kernels.rounded_codes import RoundedCodes
from specjax.models.packed import Packed

pytestmark = pytest.mark.xdist_group("codes kernel")  # a share takes all of them, or none

LAST = ((1,), (0,)), ((), ())


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_the_product_is_right_and_its_bits_do_not_depend_on_the_rows(
    monkeypatch: pytest.MonkeyPatch, case: Case, tiles: bool
):
    """Every number of rows meets several layouts; `tests/product/test_few_rows.py` has the others.

    Without AMX there are no tiles, and both cases meet the same kernel.
    """
    if not tiles:
        monkeypatch.setattr(available, "tiles", lambda: False)
    check(case, tuple(range(1, 16))[CASES.index(case) // 2 % 3 :: 3])


def test_codes_with_a_scale_for_each_output_are_multiplied_as_digits(
    monkeypatch: pytest.MonkeyPatch,
):
    """This needs VNNI, one scale for each output, no zeros, and so few inputs that a sum of their
    products has 32 bits."""
    monkeypatch.setattr(available, "tiles", lambda: False)
    whole = [case for case in CASES if case.inputs == case.group and case.codes.endswith("int8")]
    assert len(whole) == 2
    vnni = 16 in available.byte_lanes()
    for case in CASES:
        layout = coding(drawn(case))
        assert (layout is not None) == has_kernel(case)
        if layout is None:
            continue
        assert layout.digits == (3 if vnni and case in whole else 0)
        assert layout.in_digits(2**15 + 16) is None


@pytest.mark.parametrize("case", [CASES[10], CASES[19]._replace(outputs=7)], ids=str)
def test_tiles_of_digits_have_the_bits_that_vnni_has(monkeypatch: pytest.MonkeyPatch, case: Case):
    """A pass over one row is multiplied without tiles, and one over more of them in tiles.

    Without AMX both are the same kernel.
    """
    made = drawn(case)
    layout = coding(made)
    if layout is None or not layout.digits:
        return  # the test above says that this processor has no VNNI
    x = np.random.default_rng(0).normal(size=(33, case.inputs)).astype(np.float32)

    def products() -> list[np.ndarray]:
        multiply = functools.partial(kernels.few_rows_of_codes, layout)
        parts = made.codes, made.scales, made.zeros, None
        each = jax.jit(lambda x: [multiply(x[:rows], *parts) for rows in (1, 2, 5, 11, 33)])
        return [np.asarray(y) for y in each(x)]

    ours = products()
    name = f"specjax_test_without_tiles_{layout.name}"
    calling.register(Digits(layout, Machine(16, 32)), name)
    monkeypatch.setattr(available, "made", lambda *of: name)
    for y, z in zip(ours, products(), strict=True):
        np.testing.assert_array_equal(y, z)
        np.testing.assert_array_equal(y, ours[-1][: len(y)])


@pytest.mark.parametrize("case", IN_BYTES[1::2], ids=str)
def test_rounded_activations_are_multiplied_in_whole_numbers(case: Case):
    """`tests/product/test_few_rows.py` has the other cases."""
    check_rounded(case, (1, 2, 5))


def test_bytes_are_multiplied_without_vnni(monkeypatch: pytest.MonkeyPatch):
    """By two instructions of AVX2, in 4 bits."""
    monkeypatch.setattr(available, "byte_lanes", lambda: (8,))
    for case in (CASES[0], CASES[4], CASES[7]):
        layout = coding(drawn(case), rounded=True)
        assert layout is not None and layout.lanes == 8
        name = f"specjax_test_without_vnni_{layout.name}"
        calling.register(RoundedCodes(layout, Machine(8, 16), vnni=False), name)
        monkeypatch.setattr(available, "made", lambda *of, name=name: name)
        check(case, (1, 2, 5), rounded=True)
    assert coding(drawn(CASES[10]), rounded=True) is None, "8 bits would overflow"


@pytest.mark.parametrize(("lanes", "registers"), [(8, 16), (4, 32)])
def test_the_loops_for_other_processors_are_right(
    monkeypatch: pytest.MonkeyPatch, lanes: int, registers: int
):
    """Their vectors are cut into those of this one."""
    for case in (CASES[0], CASES[5], CASES[9]):
        monkeypatch.setattr(available, "lanes", lambda: lanes)
        monkeypatch.setattr(available, "tiles", lambda: False)
        layout = coding(drawn(case))
        assert layout is not None and layout.lanes == lanes
        name = f"specjax_test_{registers}_{layout.name}"
        calling.register(Codes(layout, Machine(lanes, registers)), name)
        monkeypatch.setattr(available, "made", lambda *of, name=name: name)
        check(case, (1, 2, 5))
        monkeypatch.undo()


@pytest.mark.parametrize("case", [CASES[i] for i in (0, 2, 5, 9, 10, 14, 16, 17)], ids=str)
def test_many_rows_are_multiplied_in_panels(monkeypatch: pytest.MonkeyPatch, case: Case):
    """By processors with vectors of 8 numbers.  Outputs that fill no panel come last."""
    monkeypatch.setattr(available, "lanes", lambda: 8)
    monkeypatch.setattr(available, "tiles", lambda: False)
    monkeypatch.setattr(available, "byte_lanes", lambda: ())
    made = drawn(case)
    layout = coding(made)
    assert layout is not None and layout.lanes == 8
    name = f"specjax_test_panels_{layout.name}"
    calling.register(Codes(layout, Machine(8, 16)), name)
    monkeypatch.setattr(available, "made", lambda *of, name=name: name)
    parts = made.codes, made.scales, made.zeros
    multiply = jax.jit(lambda x: kernels.few_rows_of_codes(layout, x, *parts, None))
    x = np.random.default_rng(1).normal(size=(144, case.inputs)).astype(np.float32)
    exact = x.astype(np.float64) @ made.wide
    whole, some, few = (np.asarray(multiply(x[:rows])) for rows in (144, MANY + 1, MANY))
    terms = np.abs(x).astype(np.float64) @ np.abs(made.wide)
    for y in (whole, few):
        assert (np.abs(y - exact[: len(y)]) <= 5e-7 * terms[: len(y)]).all()
    assert some.tobytes() == whole[: MANY + 1].tobytes()
    assert some[:MANY].tobytes() != few.tobytes(), "these are no panels"


def held(case: Case) -> Packed:
    made = drawn(case)
    return Packed(
        made.codes, made.scales, made.zeros, None, None, case.offset, case.inputs, case.group,
        case.codes == "fp4", bool(made.layout["pairs"]), False, True,
    )  # fmt: skip


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_a_packed_matrix_rounds_activations_in_every_program(case: Case, alone: bool):
    """With its kernel, with the kernel of float32 numbers (case 3), and with XLA."""
    matrix = dataclasses.replace(held(case), rounds=True)
    x = np.random.default_rng(0).normal(size=(600, case.inputs)).astype(np.float32)
    exact = in_8_bits(x, case.group) @ drawn(case).wide
    product = jax.jit(lambda x, w: w.unbox().product(x, LAST, alone))
    for rows in (2, 600):
        y = product(x[:rows], matrix)
        np.testing.assert_allclose(y, exact[:rows], atol=2e-6 * np.abs(exact).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_packed_matrix_is_multiplied_with_the_kernel(dtype: str):
    """And a product of more rows with XLA."""
    case = CASES[0]
    matrix = held(case)
    x = np.random.default_rng(0).normal(size=(600, case.inputs)).astype(jnp.dtype(dtype))
    product = jax.jit(lambda x, w: w.unbox().product(x, LAST, True))
    for rows in (2, 600):
        text = product.lower(x[:rows], matrix).as_text()
        assert ("specjax_codes_uint4" in text) == (rows == 2)
        y = np.asarray(product(x[:rows], matrix), np.float32)
        exact = x[:rows].astype(np.float64) @ drawn(case).wide
        bound = 1e-6 if dtype == "float32" else 8e-3
        assert np.abs(y - exact).max() <= bound * np.abs(exact).max()


def test_the_product_has_a_gradient_and_a_batched_form():
    case = CASES[3]
    matrix = held(case)
    x = np.random.default_rng(0).normal(size=(3, case.inputs)).astype(np.float32) / 100

    def loss(x: jax.Array, alone: bool) -> jax.Array:
        return jnp.sin(matrix.unbox().product(x, LAST, alone)).sum()

    ours, theirs = (jax.grad(functools.partial(loss, alone=alone))(x) for alone in (True, False))
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max())
    each = jax.vmap(lambda row: matrix.unbox().product(row[None], LAST, True)[0])(x)
    np.testing.assert_allclose(each, x.astype(np.float64) @ drawn(case).wide, atol=1e-5)


@pytest.mark.parametrize("number", [0, 2])
def test_one_matrix_of_a_stack_is_read(number: int):
    made = drawn(CASES[4])
    parts = [
        jnp.stack([jnp.roll(part, i, 0) for i in range(3)])
        for part in (made.codes, made.scales, made.zeros)
        if part is not None
    ]
    layout = kernels.coding_of(*parts, **made.layout)
    assert layout is not None
    x = np.random.default_rng(0).normal(size=(2, 3, 256)).astype(np.float32)
    y = jax.jit(functools.partial(kernels.few_rows_of_codes, layout))(x, *parts, jnp.int32(number))
    exact = x.astype(np.float64) @ np.roll(made.wide, number, 1)
    np.testing.assert_allclose(y, exact, atol=1e-6 * np.abs(exact).max())


def test_other_layouts_are_left_to_xla(monkeypatch: pytest.MonkeyPatch):
    made = drawn(CASES[0])
    assert not kernels.takes_codes(600, coding(made))
    assert not kernels.takes_codes(0, coding(made))
    for change in ({"inputs": 767}, {"group": 12}, {"fp4": True, "pairs": False}):
        assert coding(made._replace(layout=made.layout | change)) is None
    assert coding(made._replace(scales=made.scales.astype(jnp.float8_e5m2))) is None
    for scales in (made.scales[:, :-1], made.scales[:-1]):  # the kernel would read past their end
        assert coding(made._replace(scales=scales)) is None
    assert coding(made._replace(zeros=jnp.zeros((50, 1), jnp.uint8))) is None
    available.made.cache_clear()
    layout = coding(made)
    assert layout is not None
    monkeypatch.setattr(available, "_LLVMLITE", (10**6, 0))
    available.lanes.cache_clear()
    available.tiles.cache_clear()
    assert coding(made) is None and not kernels.takes_codes(1, layout)
    with pytest.raises(ValueError, match="no kernel for uint4"):
        kernels.few_rows_of_codes(layout, jnp.ones((1, 768)), made.codes, made.scales, None, None)
    monkeypatch.undo()
    for known in (available.made, available.lanes, available.tiles):
        known.cache_clear()
