"""Tensors of packed matrices in NumPy, in the formats that publishers use; needs no other file.

Codes and scales are drawn at random, so a matrix is not the quantisation of another one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

LINEAR = re.compile(r"\.(self_attn|mlp)\..*(_proj|_attn)\.weight$")
HEADS = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}


def words(codes: np.ndarray) -> np.ndarray:
    """Codes [..., 8n] of 4 bits as int32 [..., n], the first in the lowest bits."""
    parts = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32)
    return (parts << (4 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32).view(np.int32)


class Maker:
    """Makes the tensors of a matrix in one format; `scale` is that of its numbers."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)

    def scales(self, *shape: int, size: float) -> np.ndarray:
        return (size * (0.5 + self.rng.random(shape))).astype(np.float32)

    def codes(self, *shape: int, most: int = 16) -> np.ndarray:
        return self.rng.integers(0, most, shape).astype(np.uint8)

    def gptq(self, out: int, into: int, ordered: bool = False) -> dict[str, np.ndarray]:
        groups = np.arange(into) // 16
        return {
            "qweight": np.ascontiguousarray(words(self.codes(out, into)).T),
            "qzeros": words(np.full((into // 16, out), 7)),
            "scales": self.scales(into // 16, out, size=0.02).astype(np.float16),
            "g_idx": (self.rng.permutation(groups) if ordered else groups).astype(np.int32),
            "bias": np.zeros(out, np.float16),
        }

    def act_order(self, out: int, into: int) -> dict[str, np.ndarray]:
        return self.gptq(out, into, True)

    def awq(self, out: int, into: int) -> dict[str, np.ndarray]:
        return {
            "qweight": words(self.codes(into, out)),
            "qzeros": words(self.codes(into // 16, out)),
            "scales": self.scales(into // 16, out, size=0.015).astype(np.float16),
        }

    def fp8(self, out: int, into: int) -> dict[str, np.ndarray]:
        numbers = self.rng.normal(size=(out, into)).astype(ml_dtypes.float8_e4m3fn)
        grid = -(-out // 32), -(-into // 16)
        return {"weight": numbers, "weight_scale_inv": self.scales(*grid, size=0.12)}

    def fp8_by_output(self, out: int, into: int) -> dict[str, np.ndarray]:
        numbers = self.rng.normal(size=(out, into)).astype(ml_dtypes.float8_e4m3fn)
        scale = self.scales(out, 1, size=0.12).astype(ml_dtypes.bfloat16)
        return {"weight": numbers, "weight_scale": scale}

    def mxfp4(self, out: int, into: int) -> dict[str, np.ndarray]:
        return {
            "weight_packed": self.codes(out, into // 2, most=256),
            "weight_scale": self.codes(out, into // 32, most=3) + np.uint8(122),
        }

    def nvfp4_divided(self, out: int, into: int) -> dict[str, np.ndarray]:
        scale = self.scales(out, into // 16, size=20.0).astype(ml_dtypes.float8_e4m3fn)
        return {
            "weight_packed": self.codes(out, into // 2, most=256),
            "weight_scale": scale,
            "weight_global_scale": np.array([513.7], np.float32),
        }

    def int8(self, out: int, into: int) -> dict[str, np.ndarray]:
        return {
            "weight": self.codes(out, into, most=255).view(np.int8),
            "weight_scale": self.scales(out, 1, size=0.0015).astype(ml_dtypes.bfloat16),
        }

    def packed(self, out: int, into: int) -> dict[str, np.ndarray]:
        return {
            "weight_packed": words(self.codes(out, into)),
            "weight_scale": self.scales(out, into // 16, size=0.02).astype(ml_dtypes.bfloat16),
            "weight_shape": np.array([out, into]),
        }

    def nvfp4(self, out: int, into: int) -> dict[str, np.ndarray]:
        scale = self.scales(out, into // 16, size=20.0).astype(ml_dtypes.float8_e4m3fn)
        return {
            "weight": self.codes(out, into // 2, most=256),
            "weight_scale": scale,
            "weight_scale_2": np.array(0.002, np.float32),
        }


FORMATS: dict[str, tuple[Callable[[Maker, int, int], dict[str, np.ndarray]], dict[str, Any]]] = {
    "gptq": (Maker.gptq, {"quant_method": "gptq", "bits": 4, "group_size": 16}),
    "act-order": (
        Maker.act_order, {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True},
    ),
    "awq": (Maker.awq, {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}),
    "fp8": (Maker.fp8, {"quant_method": "fp8", "weight_block_size": [32, 16]}),
    "int8": (Maker.int8, {**HEADS, "format": "int-quantized", "config_groups": {}}),
    "int4": (Maker.packed, {**HEADS, "format": "pack-quantized", "config_groups": {}}),
    "nvfp4": (Maker.nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "fp8 by output": (
        Maker.fp8_by_output, {**HEADS, "format": "float-quantized", "config_groups": {}},
    ),
    "nvfp4 divided": (
        Maker.nvfp4_divided, {**HEADS, "format": "nvfp4-pack-quantized", "config_groups": {}},
    ),
    "mxfp4": (Maker.mxfp4, {**HEADS, "format": "mxfp4-pack-quantized", "config_groups": {}}),
}  # fmt: skip
