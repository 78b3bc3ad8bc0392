"""Matrices in the formats of quantised folders, for programs that are compiled without weights."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from specjax.files import Packed, Scales, rounded

_BF16, _E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)


def _scales(matrix: np.ndarray, group: int | None, dtype: np.dtype) -> np.ndarray:
    """Returns scales [out, groups]; `group` None: an output has one."""
    outputs, inputs = matrix.shape
    return np.ones((outputs, -(-inputs // group) if group else 1), dtype)


def _fp8(matrix: np.ndarray) -> Packed:
    scales = Scales(_scales(matrix, 128, np.dtype(np.float32)))
    return Packed(matrix.astype(_E4M3), scales, 128, 8, rows=128)


def _fp8_by_output(matrix: np.ndarray) -> Packed:
    return Packed(matrix.astype(_E4M3), Scales(_scales(matrix, None, _BF16)), matrix.shape[-1], 8)


def _int8(matrix: np.ndarray) -> Packed:
    return Packed(matrix.astype(np.int8), Scales(_scales(matrix, None, _BF16)), matrix.shape[-1], 8)


def _awq(matrix: np.ndarray) -> Packed:
    scales = _scales(matrix, 128, np.dtype(np.float16))
    zeros = np.full(scales.shape, 8, np.int16)
    return Packed(matrix.astype(np.uint8), Scales(scales), 128, 4, zeros=zeros)


def _act_order(matrix: np.ndarray) -> Packed:
    scales = _scales(matrix, 128, np.dtype(np.float16))
    order = np.arange(matrix.shape[-1], dtype=np.int32)
    return Packed(matrix.astype(np.uint8), Scales(scales), 128, 4, offset=8, order=order)


def _mxfp4(matrix: np.ndarray) -> Packed:
    scales = _scales(matrix, 32, np.dtype(np.uint8))
    return Packed(matrix.astype(np.uint8), Scales(scales), 32, 4, fp4=True)


def _nvfp4(matrix: np.ndarray) -> Packed:
    whole = np.ones((len(matrix), 1), np.float32)
    scales = Scales(_scales(matrix, 16, _E4M3), whole)
    return Packed(matrix.astype(np.uint8), scales, 16, 4, fp4=True)


FORMATS: dict[str, Callable[[np.ndarray], Packed]] = {
    "int4": rounded,
    "fp8": _fp8,
    "fp8-by-output": _fp8_by_output,
    "int8-by-output": _int8,
    "awq": _awq,
    "gptq-act-order": _act_order,
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
}
"""Name -> a function that packs a matrix [out, in] of zeros.

`int4` is that of `load(dtype="int4")`, `fp8` is in blocks of 128 x 128, and `awq` and GPTQ have
groups of 128 inputs.
"""
