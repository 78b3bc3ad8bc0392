"""Rounds matrices to 4 bits: each number to the nearest multiple of its group's scale."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from specjax.files.packed.matrix import Packed, Scales

_GROUPS = (128, 64, 32)
"""The inputs of a group: the first of these that divides the inputs of a matrix."""

_HALF = 8  # of the 16 codes


def group_for(inputs: int) -> int:
    """Returns the inputs of a group; all inputs of an output, if no size divides them."""
    return next((size for size in _GROUPS if inputs % size == 0), inputs)


def rounded(matrix: np.ndarray) -> Packed:
    """Returns [..., out, in] float32 in 4 bits, with scales in bfloat16.

    A scale is the largest absolute value of the group over 7.5, as compressed-tensors computes it,
    so the codes -8 and 7 stand for the two ends, and one end is cut by half a step.
    """
    *outer, inputs = matrix.shape
    group = group_for(inputs)
    parts = matrix.reshape(*outer, inputs // group, group)
    scales = (np.abs(parts).max(-1) / (_HALF - 0.5)).astype(ml_dtypes.bfloat16)
    steps = scales.astype(np.float32)[..., None]
    codes = np.rint(np.divide(parts, steps, out=np.zeros_like(parts), where=steps != 0))
    codes = (np.clip(codes, -_HALF, _HALF - 1) + _HALF).astype(np.uint8)
    return Packed(codes.reshape(matrix.shape), Scales(scales), group, 4, offset=_HALF)
