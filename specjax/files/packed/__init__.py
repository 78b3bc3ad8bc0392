"""Packed weights in files: FP8, compressed-tensors, AWQ, GPTQ, MXFP4 and NVFP4."""

from specjax.files.packed.matrix import Packed, PackedTensor, Scales
from specjax.files.packed.scheme import (
    Scheme,
    forms,
    read_scheme,
    unquantised,
    without_zero_biases,
)

__all__ = [
    "Packed",
    "PackedTensor",
    "Scales",
    "Scheme",
    "forms",
    "read_scheme",
    "unquantised",
    "without_zero_biases",
]
