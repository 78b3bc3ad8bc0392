"""GPTQ (Frantar et al. 2022, arXiv 2210.17323) in the layouts of AutoGPTQ and GPTQModel.

A word of int32 has 8 inputs of one output (4 of 8 bits), lowest bits first.  The first layout
stores each zero less one, as words: one was subtracted from every code of a word at once.  `g_idx`
has the group of each input, which may be any group (act-order).
"""

from __future__ import annotations

import numpy as np

from specjax.files.packed.format import (
    Format,
    Parts,
    check_shape,
    finite,
    groups_of,
    in_groups,
)
from specjax.files.packed.matrix import (
    Packed,
    PackedTensor,
    Scales,
    codes_of_words,
    packed_tensor,
    raw,
)
from specjax.models import Config

_ONES = {4: 0x11111111, 8: 0x01010101}


def _open(parts: Parts, config: Config) -> PackedTensor:
    bits, old = config["bits"], config["checkpoint_format"] == "gptq"
    words, zeros, scale = parts["qweight"], parts["qzeros"], parts["scales"]
    if len(words.shape) != 2 or len(scale.shape) != 2:
        raise ValueError(
            f"it has shape {list(words.shape)} and scales {list(scale.shape)}, which are no "
            "matrices"
        )
    inputs, outputs = words.shape[0] * 32 // bits, words.shape[1]
    groups = scale.shape[0]
    check_shape(scale, "scales", (groups, outputs), ("F16", "BF16", "F32"))
    check_shape(zeros, "qzeros", (groups, -(-outputs * bits // 32)), ("I32",))
    group = groups_of(inputs, groups, config["group_size"], "scales")
    finite(scale, "scales")
    order = in_groups(parts.get("g_idx"), inputs, group)

    def read() -> Packed:
        codes = codes_of_words(raw(words).T, bits)
        codes = codes if order is None else codes[:, order]
        stored = raw(zeros).view(np.uint32)
        stored = stored + np.uint32(_ONES[bits]) if old else stored
        zero = codes_of_words(stored.view(np.int32), bits)[:, :outputs].T.astype(np.int16)
        each = Scales(np.ascontiguousarray(raw(scale).T))
        half = 2 ** (bits - 1)
        if (zero == half).all():  # as in symmetric files
            return Packed(codes, each, group, bits, None, half, order)
        return Packed(codes, each, group, bits, zero, 0, order)

    named = {"codes": words, "zeros": zeros, "scale": scale}
    named |= {} if order is None else {"order": parts["g_idx"]}
    return packed_tensor((outputs, inputs), f"GPTQ int{bits}", named, read, group)


GPTQ = Format("GPTQ", "qweight", ("I32",), "weight", (("qzeros",), ("scales",)), ("g_idx",), _open)
