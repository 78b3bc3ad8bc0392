"""Matrices of codes with scales by group, and what their kernels must give."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from specjax import kernels
from specjax.kernels import available

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


class Case(NamedTuple):
    """A layout, and the size of a matrix in it."""

    outputs: int
    inputs: int
    group: int
    codes: str  # int4, fp4, int8, uint8 or fp8
    scales: str = "bfloat16"
    offset: int = 0
    zeros: bool = False


CASES = [
    Case(50, 768, 128, "int4", offset=8),
    Case(37, 1024, 32, "int4", "float16", offset=8),  # as GGUF's Q4_0
    Case(33, 576, 64, "int4", "float32", offset=8),  # no multiple of 128
    Case(40, 96, 32, "int4", offset=8, zeros=True),
    Case(50, 256, 128, "int4", "float16", zeros=True),  # as AWQ
    Case(21, 256, 32, "int4", "float32", zeros=True),
    Case(50, 256, 256, "int4", offset=8),
    Case(20, 256, 32, "fp4", "uint8"),  # MXFP4
    Case(20, 256, 128, "fp4", "uint8"),
    Case(50, 768, 32, "int8", "float16"),  # Q8_0
    Case(50, 768, 768, "int8", "float32"),
    Case(20, 256, 16, "int8"),
    Case(20, 96, 32, "uint8", offset=128, zeros=True),
    Case(50, 256, 16, "fp4", "float8_e4m3fn"),  # NVFP4
    Case(50, 768, 128, "fp8", "float32"),
    Case(20, 96, 96, "fp8"),
    Case(20, 192, 128, "fp8", "float32"),  # the last group of an output is cut
    Case(21, 640, 512, "int8", zeros=True),
    Case(20, 384, 256, "int4", offset=8),
    Case(21, 208, 208, "uint8", offset=128),  # a channel has one scale, and inputs are no vectors
]

IN_BYTES = [
    case
    for case in CASES
    if case.codes != "fp8" and (case.inputs, case.codes) not in ((96, "int4"), (208, "uint8"))
]
"""The cases whose rounded activations have a kernel; the others are rounded by XLA."""


class Drawn(NamedTuple):
    codes: jax.Array
    scales: jax.Array
    zeros: jax.Array | None
    wide: np.ndarray  # [inputs, outputs] float64
    layout: dict  # the keywords of `kernels.coding_of`


def drawn(case: Case) -> Drawn:
    """A random matrix of a case."""
    rng = np.random.default_rng(case.inputs + case.outputs)
    bits = 4 if case.codes.endswith("4") else 8
    raw = rng.integers(0, 2**bits, (case.outputs, case.inputs)).astype(np.uint8)
    shape = case.outputs, -(-case.inputs // case.group)
    if case.scales == "uint8":
        scales = rng.integers(124, 130, shape).astype(np.uint8)
        factors = 2.0 ** (scales.astype(np.float64) - 127)
    else:
        kind = jnp.dtype(case.scales)
        scales = rng.uniform(0.5, 1.5, shape).astype(kind)
        factors = scales.astype(np.float64)
    zeros = rng.integers(0, 2**bits, shape).astype(np.uint8) if case.zeros else None
    codes = raw.view(np.int8) if case.codes == "int8" else raw
    if case.codes == "fp8":
        codes = np.where((raw & 0x7F) == 0x7F, raw - 1, raw).view(ml_dtypes.float8_e4m3fn)  # no NaN
    wide = codes.astype(np.float64) - case.offset
    if case.codes == "fp4":
        wide = np.concatenate([_E2M1, -_E2M1])[raw]
    if zeros is not None:
        wide = wide - np.repeat(zeros.astype(np.float64), case.group, 1)[:, : case.inputs]
    wide = wide * np.repeat(factors, case.group, 1)[:, : case.inputs]
    if bits == 4:
        codes = raw[:, 0::2] | (raw[:, 1::2] << 4)
    layout = dict(
        inputs=case.inputs, group=case.group, offset=case.offset, pairs=bits == 4,
        fp4=case.codes == "fp4",
    )  # fmt: skip
    held = None if zeros is None else jnp.asarray(zeros)
    return Drawn(jnp.asarray(codes), jnp.asarray(scales), held, wide.T, layout)


def coding(made: Drawn, rounded: bool = False) -> kernels.Coding | None:
    return kernels.coding_of(made.codes, made.scales, made.zeros, **made.layout, rounded=rounded)


def has_kernel(case: Case) -> bool:
    """Whether this processor multiplies such codes: those of e2m1 need vectors of 512 bits."""
    return case.codes != "fp4" or available.lanes() >= 16


def in_8_bits(x: np.ndarray, group: int) -> np.ndarray:
    """Activations [..., inputs], rounded to 255 numbers in each group of inputs."""
    parts = x.reshape(*x.shape[:-1], -1, group)
    step = np.maximum(np.abs(parts).max(-1, keepdims=True), np.float32(1e-30)) * np.float32(1 / 127)
    return (np.rint(parts / step).astype(np.float64) * step).reshape(x.shape)


def check_rounded(case: Case, rows: tuple[int, ...]):
    """As `check`, with rounded activations.  AVX2 has a kernel for 4 bits, and VNNI for 8 too."""
    lanes = available.byte_lanes()
    if 16 in lanes or (lanes and case.codes.endswith("4")):
        check(case, rows, rounded=True)
    else:
        assert coding(drawn(case), rounded=True) is None


def check(case: Case, rows: tuple[int, ...], rounded: bool = False):
    """A product is that of the numbers, and the first rows have the bits that they have alone."""
    made = drawn(case)
    layout = coding(made, rounded)
    if not rounded and not has_kernel(case):
        assert layout is None
        return
    assert layout is not None and kernels.takes_codes(16, layout)
    multiply = functools.partial(kernels.few_rows_of_codes, layout)
    parts = made.codes, made.scales, made.zeros

    @jax.jit
    def all_and_some(x: jax.Array) -> list[jax.Array]:
        return [multiply(x[:n], *parts, None) for n in (16, *rows)] + [
            multiply(x[9:11], *parts, None)
        ]

    x = np.random.default_rng(1).normal(size=(16, case.inputs)).astype(np.float32)
    x[4], x[5, 1] = 0, 1e4
    x[6] *= 1e-20
    whole, *firsts, middle = map(np.asarray, all_and_some(x))
    wanted = in_8_bits(x, min(case.group, 128)) if rounded else x.astype(np.float64)
    exact = wanted @ made.wide
    assert (np.abs(whole - exact).max(1) <= 1e-6 * np.abs(exact).max(1)).all()
    for count, some in zip(rows, firsts, strict=True):
        assert some.tobytes() == whole[:count].tobytes()
    assert middle.tobytes() == whole[9:11].tobytes()
    x[3, 5], x[9, 7] = np.nan, np.inf
    spoilt = np.asarray(all_and_some(x)[0])
    assert not np.isfinite(spoilt[[3, 9]]).any(), "a number that is not finite was lost"
    others = np.delete(np.arange(16), [3, 9])
    assert spoilt[others].tobytes() == whole[others].tobytes()
