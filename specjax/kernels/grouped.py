"""Computes x @ w for few rows of x, where w is a matrix of codes with scales by group."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from specjax._internal.processors import processors
from specjax.kernels import available
from specjax.kernels.coding import ALL, DIGIT_STEP, ROUNDED_ROWS, VNNI, Coding
from specjax.kernels.narrow import FEW_PROCESSORS, takes

_MOST_ROWS = {8: 16, 16: 32}
"""The most rows for which the kernels were faster than XLA, by the float32 numbers of a vector.

With vectors of 16 numbers, 48 rows of a matrix [2048, 768] took as long as XLA on two Intel cores.
"""

_FEW_PROCESSORS_ROWS = {8: 512, 16: 128}
"""The same on a few processors.  On two AMD cores with vectors of 16 numbers, 64 and 128 rows of
matrices of 512 to 4096 inputs took 0.4 to 1.2 of XLA's time.  On two with vectors of 8 numbers,
passes over 32 and 64 tokens took 0.45 to 0.72, and prompts of 138 to 225 tokens 0.70.
"""

_MOST_IN_TILES = 512
"""The most rows in tiles: prompts of 144 and 400 tokens took .4 and .55 of the time with XLA."""

_MOST_ROUNDED = 512
"""The most rows that are rounded."""

_FP8 = "float8_e4m3fn"
_SCALES = ("float32", "bfloat16", "float16", "uint8", _FP8)
_ZEROS = (None, "uint8", "int8")


def coding_of(
    codes: Array,
    scales: Array,
    zeros: Array | None,
    *,
    inputs: int,
    group: int,
    offset: int,
    pairs: bool,
    fp4: bool,
    rounded: bool = False,
) -> Coding | None:
    """Returns the layout of a matrix [outputs, inputs] or a stack of them; None without a kernel.

    Args:
      codes: [..., outputs, bytes] in uint8 with `pairs`, else in int8, uint8 or float8_e4m3fn.
      scales: [..., outputs, groups].
      zeros: as `scales`, whole numbers; or None.
      inputs: of the matrix.
      group: the inputs that share a scale.
      offset: is subtracted from every code.
      pairs: two codes of 4 bits are a byte; the code of the even input is the low one.
      fp4: the codes are numbers of e2m1.
      rounded: activations are rounded to 8 bits, and as many as `together` says share a step.
    """
    bits = 4 if pairs else 8
    kinds = ("uint8",) if pairs else ("uint8", "int8", _FP8)
    kind_of_zeros = None if zeros is None else zeros.dtype.name
    known = (
        codes.size > 0
        and codes.dtype.name in kinds
        and codes.shape[-1] * (8 // bits) == inputs
        and scales.shape[:-1] == codes.shape[:-1]
        and scales.shape[-1] in (1, -(-inputs // group))
        and (zeros is None or zeros.shape == scales.shape)
        and scales.dtype.name in _SCALES
        and kind_of_zeros in _ZEROS
    )
    if not known or (fp4 and not pairs):
        return None
    lanes = available.lanes()
    if scales.shape[-1] == 1:
        group = ALL
    kind = codes.dtype.name
    made = Coding(
        bits, fp4, kind == "int8", offset, group, scales.dtype.name, kind_of_zeros, lanes,
        fp8=kind == _FP8, cut=group != ALL and inputs % group > 0,
    )  # fmt: skip
    if rounded:
        widths = available.byte_lanes()
        found = (made.in_bytes(inputs, width, VNNI in widths) for width in widths)
        return next((each for each in found if each is not None), None)
    if VNNI in available.byte_lanes() and (in_digits := made.in_digits(inputs)) is not None:
        return in_digits
    if available.tiles() and (tiled := made.in_tiles(inputs, codes.shape[-2])) is not None:
        return tiled
    while lanes >= 4:
        made = dataclasses.replace(made, lanes=lanes)
        if made.takes(inputs):
            return made
        lanes //= 2
    return None


def takes_codes(rows: int, coding: Coding | None) -> bool:
    """Returns whether `few_rows_of_codes` multiplies this many rows."""
    return (
        coding is not None
        and 0 < rows <= most_rows_of_codes(coding)
        and available.made("codes", coding.kind, coding) is not None
    )


def most_rows_of_codes(coding: Coding) -> int:
    """Returns the most rows for which a kernel is faster than XLA."""
    if coding.rounded or coding.digits or coding.tiles:
        return _MOST_IN_TILES if coding.tiles else _MOST_ROUNDED
    few = coding.lanes == available.lanes() and processors() <= FEW_PROCESSORS
    return (_FEW_PROCESSORS_ROWS if few else _MOST_ROWS).get(coding.lanes, 16)


def few_rows_of_codes(
    coding: Coding, x: Array, codes: Array, scales: Array, zeros: Array | None, number: Array | None
) -> Array:
    """Computes x @ the matrix, in a program for one CPU.

    Args:
      coding: says what the codes stand for; see `coding_of` for them.
      x: [B, N, K] or [N, K] of any dtype.
      codes, scales, zeros: of a matrix, or of a stack [E, ...].
      number: of the matrix in the stack, in [0, E); None without a stack.

    Returns:
      [B, N, outputs] or [N, outputs] in float32.
    """
    target = available.made("codes", coding.kind, coding)
    if target is None:
        raise ValueError(f"no kernel for {coding.kind} on this CPU; ask `takes_codes` first")
    parts = [part for part in (codes, scales, zeros) if part is not None]
    if number is None:
        parts, number = [part[None] for part in parts], jnp.zeros((), jnp.int32)
    parts.append(number.astype(jnp.int32).reshape(1))
    outputs = codes.shape[-2]
    rows = x.reshape(-1, *(1, *x.shape)[-2:]).astype(jnp.float32)
    shape = jax.ShapeDtypeStruct((*rows.shape[:2], outputs), jnp.float32)
    call = jax.ffi.ffi_call(target, shape, vmap_method="sequential")
    return call(rows, *parts).reshape(*x.shape[:-1], outputs)


def takes_rounded(rows: int, weights: Array) -> bool:
    """Returns whether `few_rounded_rows` multiplies this many rows."""
    return (
        takes(rows, weights, 1)
        and weights.shape[1] % DIGIT_STEP == 0
        and takes_codes(rows, ROUNDED_ROWS)
    )


def few_rounded_rows(x: Array, weights: Array, scales: Array) -> Array:
    """Computes rows, rounded to int8, times a matrix in int8, in a program for one CPU.

    A row's step is its largest absolute value / 127; see `digits.py`.

    Args:
      x: [B, N, K] or [N, K] of any dtype.
      weights: [M, K] int8.
      scales: [M] float32, of the rows of `weights`.

    Returns:
      [B, N, M] or [N, M] float32.
    """
    return few_rows_of_codes(ROUNDED_ROWS, x, weights, scales[:, None], None, None)
