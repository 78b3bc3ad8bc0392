"""Packed weights in files: FP8, compressed-tensors, AWQ, GPTQ, MXFP4 and NVFP4."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.files.packed.configuration import (
        described,
        quantisation_of,
        read_scheme,
        unquantised,
    )
    from specjax.files.packed.leaves import (
        check_rounded_shards,
        check_shards,
        held_bytes,
        may_be_packed,
        may_be_rounded,
        read_leaf,
        refuse_shards,
        rounded_leaf,
        stays_packed,
    )
    from specjax.files.packed.matrix import Packed, PackedTensor, Scales, packed_tensor
    from specjax.files.packed.rounding import group_for, rounded, scales_for
    from specjax.files.packed.scheme import Scheme, forms, without_zero_biases
    from specjax.files.packed.writer import packed_tables

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "Packed",
    "PackedTensor",
    "Scales",
    "Scheme",
    "check_rounded_shards",
    "check_shards",
    "described",
    "forms",
    "group_for",
    "held_bytes",
    "may_be_packed",
    "may_be_rounded",
    "packed_tables",
    "packed_tensor",
    "quantisation_of",
    "read_leaf",
    "read_scheme",
    "refuse_shards",
    "rounded",
    "rounded_leaf",
    "scales_for",
    "stays_packed",
    "unquantised",
    "without_zero_biases",
]
