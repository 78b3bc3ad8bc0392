"""AWQ (Lin et al. 2023, arXiv 2306.00978) in the layout of AutoAWQ's "gemm".

A word of int32 has eight outputs of one input, in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

import numpy as np

from specjax.files.packed.format import Format, Parts, check_shape, finite, groups_of
from specjax.files.packed.matrix import (
    Packed,
    PackedTensor,
    Scales,
    codes_of_words,
    packed_tensor,
    raw,
)
from specjax.models import Config

_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""The place in a word of each of its outputs."""


def _in_order(words: np.ndarray) -> np.ndarray:
    """Returns the codes [inputs, outputs] of words [inputs, outputs / 8]."""
    codes = codes_of_words(words, 4)
    return codes.reshape(len(words), -1, 8)[..., _PLACES].reshape(codes.shape)


def _open(parts: Parts, config: Config) -> PackedTensor:
    words, zeros, scale = parts["qweight"], parts["qzeros"], parts["scales"]
    if len(words.shape) != 2 or len(scale.shape) != 2:
        raise ValueError(
            f"it has shape {list(words.shape)} and scales {list(scale.shape)}, which are no "
            "matrices"
        )
    inputs, outputs = words.shape[0], 8 * words.shape[1]
    groups = scale.shape[0]
    check_shape(scale, "scales", (groups, outputs), ("F16", "BF16", "F32"))
    check_shape(zeros, "qzeros", (groups, words.shape[1]), ("I32",))
    group = groups_of(inputs, groups, config["group_size"], "scales")
    finite(scale, "scales")

    def read() -> Packed:
        codes = np.ascontiguousarray(_in_order(raw(words)).T)
        zero = _in_order(raw(zeros)).T.astype(np.int16)
        return Packed(codes, Scales(np.ascontiguousarray(raw(scale).T)), group, 4, zero)

    named = {"codes": words, "zeros": zeros, "scale": scale}
    return packed_tensor((outputs, inputs), "AWQ", named, read, group)


AWQ = Format("AWQ", "qweight", ("I32",), "weight", (("qzeros",), ("scales",)), (), _open)
