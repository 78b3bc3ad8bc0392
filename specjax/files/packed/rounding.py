"""Rounds matrices to 4 or 8 bits: each number to the nearest multiple of its group's scale."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from specjax.files.packed.matrix import Packed, Scales

_GROUPS = (128, 64, 32)
"""The inputs of a group: the first of these that divides the inputs of a matrix."""


def group_for(inputs: int) -> int:
    """Returns the inputs of a group; all inputs of an output, if no size divides them."""
    return next((size for size in _GROUPS if inputs % size == 0), inputs)


def scales_for(matrix: np.ndarray, group: int, bits: int) -> np.ndarray:
    """Returns the scales [..., out, groups] of [..., out, in] float32, in bfloat16.

    A scale is the largest absolute value of the group over 7.5 (or 127.5), as compressed-tensors
    computes it, so the codes -8 and 7 stand for the two ends, and one end is cut by half a step.
    """
    *outer, inputs = matrix.shape
    parts = matrix.reshape(*outer, inputs // group, group)
    return (np.abs(parts).max(-1) / (2 ** (bits - 1) - 0.5)).astype(ml_dtypes.bfloat16)


def rounded(matrix: np.ndarray, bits: int = 4, group: int | None = None) -> Packed:
    """Returns [..., out, in] float32 in 4 or 8 bits, with scales in bfloat16.

    `group` is the inputs of a group, which divides those of the matrix; None: `group_for` says.
    """
    *outer, inputs = matrix.shape
    group, half = group or group_for(inputs), 2 ** (bits - 1)
    scales = scales_for(matrix, group, bits)
    parts = matrix.reshape(*outer, inputs // group, group)
    steps = scales.astype(np.float32)[..., None]
    codes = np.rint(np.divide(parts, steps, out=np.zeros_like(parts), where=steps != 0))
    codes = (np.clip(codes, -half, half - 1) + half).astype(np.uint8)
    return Packed(codes.reshape(matrix.shape), Scales(scales), group, bits, offset=half)
