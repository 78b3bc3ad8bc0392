"""Packed weights in files: FP8, compressed-tensors, AWQ, GPTQ, MXFP4 and NVFP4."""

from specjax.files.packed.leaves import (
    check_shards,
    held_bytes,
    read_leaf,
    refuse_shards,
    stays_packed,
)
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
    "check_shards",
    "forms",
    "held_bytes",
    "read_leaf",
    "read_scheme",
    "refuse_shards",
    "stays_packed",
    "unquantised",
    "without_zero_biases",
]
