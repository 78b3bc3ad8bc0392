"""FP8: e4m3 numbers with a scale for each block, output or matrix.

It is the format of DeepSeek V3 (arXiv 2412.19437, section 3.3), of Qwen's, GLM's and MiniMax's FP8
folders, of compressed-tensors' float-quantized, and of modelopt's FP8.  A stored scale multiplies,
also where its name ends in "inv".
"""

from __future__ import annotations

import numpy as np

from specjax.files.packed.format import FLOATS, Format, Parts, finite
from specjax.files.packed.matrix import Packed, PackedTensor, Scales, packed_tensor, raw
from specjax.models import Config

_INVERSE, _SCALE = "_scale_inv", "_scale"
_KINDS = (*FLOATS, "F8_E8M0", "U8")


def _open(parts: Parts, config: Config) -> PackedTensor:
    codes = parts[""]
    name, scale = next((name, parts[name]) for name in (_INVERSE, _SCALE) if name in parts)
    if scale.kind not in _KINDS:
        raise ValueError(f"its {name} is stored as {scale.kind} instead of {' or '.join(_KINDS)}")
    if len(codes.shape) < 2:
        raise ValueError(f"it has shape {list(codes.shape)}, which is no matrix")
    *stack, outputs, inputs = codes.shape
    block: list[int] | None = config.get("weight_block_size")
    grid = None if block is None else (-(-outputs // block[0]), -(-inputs // block[1]))
    shape = (*scale.shape,)
    if block is not None and grid is not None and shape == (*stack, *grid):
        rows, group = block
    elif shape in ((*stack, outputs, 1), (*stack, outputs)):
        shape, rows, group = (*stack, outputs, 1), 1, inputs
    elif shape in ((), (1,), (*stack, 1, 1), (*stack, 1), tuple(stack)):
        shape = (*stack, 1, 1) if shape not in ((), (1,)) else (*[1] * len(stack), 1, 1)
        rows, group = outputs, inputs
    else:
        blocks = "" if grid is None else f" {[*stack, *grid]} (blocks of {block}),"
        raise ValueError(
            f"its {name} has shape {list(scale.shape)} instead of{blocks} {[outputs, 1]} or [1]"
        )
    finite(scale, f"its {name}")

    def read() -> Packed:
        each = np.repeat(raw(scale).reshape(shape), rows, axis=-2)[..., :outputs, :]
        each = np.broadcast_to(each, (*stack, outputs, each.shape[-1]))
        return Packed(raw(codes), Scales(each), group, 8, rows=rows)

    return packed_tensor(codes.shape, "FP8", {"codes": codes, "scale": scale}, read, group)


FP8 = Format("FP8", "", ("F8_E4M3",), "", ((_INVERSE, _SCALE),), (), _open)
