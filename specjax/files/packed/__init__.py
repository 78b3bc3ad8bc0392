"""Packed weights in files: FP8, compressed-tensors, AWQ, GPTQ, MXFP4 and NVFP4."""

from specjax.files.packed.leaves import (
    check_rounded_shards,
    check_shards,
    held_bytes,
    may_be_packed,
    read_leaf,
    refuse_shards,
    rounded_leaf,
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
from specjax.files.packed.writer import packed_tables

__all__ = [
    "Packed",
    "PackedTensor",
    "Scales",
    "Scheme",
    "check_rounded_shards",
    "check_shards",
    "forms",
    "held_bytes",
    "may_be_packed",
    "packed_tables",
    "read_leaf",
    "read_scheme",
    "refuse_shards",
    "rounded_leaf",
    "stays_packed",
    "unquantised",
    "without_zero_biases",
]
