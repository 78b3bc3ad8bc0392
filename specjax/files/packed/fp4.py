"""FP4: e2m1 numbers in pairs, with scales of e8m0 (MXFP4) or e4m3 (NVFP4) for small groups.

MXFP4 (OCP Microscaling Formats 1.0) has a power of two for 32 inputs: gpt-oss holds it in tensors
of all experts of a layer, and compressed-tensors in matrices.  NVFP4 has an e4m3 number for 16
inputs, and one float32 number for the matrix, by which modelopt multiplies and compressed-tensors
divides.
"""

from __future__ import annotations

import numpy as np

from specjax.files.headers import Stored
from specjax.files.packed.format import Format, Parts, check_shape, finite
from specjax.files.packed.matrix import Packed, PackedTensor, Scales, nibbles, packed_tensor, raw
from specjax.models import Config

_MX, _NV = 32, 16


def _sizes(codes: Stored, scale: Stored, name: str, group: int, kind: str) -> tuple[int, int]:
    if len(codes.shape) != 2 or (2 * codes.shape[1]) % group:
        raise ValueError(
            f"it has shape {list(codes.shape)}; it must be a matrix with a multiple of "
            f"{group // 2} bytes for each output"
        )
    outputs, inputs = codes.shape[0], 2 * codes.shape[1]
    check_shape(scale, name, (outputs, inputs // group), (kind,))
    finite(scale, name)
    return outputs, inputs


def _open_experts(parts: Parts, config: Config) -> PackedTensor:
    blocks, scale = parts["_blocks"], parts["_scales"]
    if len(blocks.shape) < 3 or blocks.shape[-1] != _MX // 2:
        raise ValueError(f"it has shape {list(blocks.shape)} instead of [..., outputs, blocks, 16]")
    check_shape(scale, "_scales", blocks.shape[:-1], ("U8",))
    finite(scale, "_scales")
    *stack, outputs, count, _ = blocks.shape
    inputs = count * _MX

    def read() -> Packed:
        codes = nibbles(raw(blocks)).reshape(*stack, outputs, inputs)
        return Packed(codes, Scales(raw(scale)), _MX, 4, fp4=True)

    named = {"codes": blocks, "scale": scale}
    return packed_tensor((*stack, inputs, outputs), "MXFP4", named, read, _MX, turned=True)


def _open_mx(parts: Parts, config: Config) -> PackedTensor:
    codes, scale = parts["weight_packed"], parts["weight_scale"]
    shape = _sizes(codes, scale, "weight_scale", _MX, "U8")

    def read() -> Packed:
        return Packed(nibbles(raw(codes)), Scales(raw(scale)), _MX, 4, fp4=True)

    return packed_tensor(shape, "MXFP4", {"codes": codes, "scale": scale}, read, _MX)


def _open_nv(parts: Parts, config: Config) -> PackedTensor:
    divided = "weight_packed" in parts
    codes = parts["weight_packed" if divided else "weight"]
    scale, name = parts["weight_scale"], "weight_global_scale" if divided else "weight_scale_2"
    shape = _sizes(codes, scale, "weight_scale", _NV, "F8_E4M3")
    check_shape(parts[name], name, (1,), ("F32",))
    factor = finite(parts[name], name).reshape(1, 1)
    if divided and factor == 0:
        raise ValueError(f"{name} is 0, and the scales are divided by it")

    def read() -> Packed:
        whole = np.broadcast_to(factor, (shape[0], 1))
        return Packed(nibbles(raw(codes)), Scales(raw(scale), whole, divided), _NV, 4, fp4=True)

    named = {"codes": codes, "scale": scale, "whole": parts[name]}
    return packed_tensor(shape, "NVFP4", named, read, _NV)


EXPERTS = Format("MXFP4", "_blocks", ("U8",), "", (("_scales",),), (), _open_experts)
MX = Format("MXFP4", "weight_packed", ("U8",), "weight", (("weight_scale",),), (), _open_mx)
NV = Format(
    "NVFP4", "weight_packed", ("U8",), "weight", (("weight_scale",), ("weight_global_scale",)), (),
    _open_nv,
)  # fmt: skip
NV_MODELOPT = Format(
    "NVFP4", "weight", ("U8",), "weight", (("weight_scale",), ("weight_scale_2",)), (), _open_nv
)
