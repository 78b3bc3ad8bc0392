"""Small folders with packed weights, made in NumPy from the folders of `folders` and others.

Codes and scales are drawn at random, so a model is not the quantisation of another one.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from typing import Any

import folders
import ml_dtypes
import numpy as np

from specjax.files import open_tensors
from specjax.files.packed.matrix import raw

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
}  # fmt: skip


def packed(model: folders.Llama, format: str, plain: str = "(?!)", seed: int = 0) -> folders.Llama:
    """The model with its linear maps in a format, but for those whose names match `plain`."""
    make, config = FORMATS[format]
    maker, tensors = Maker(seed), {}
    for name, tensor in model.tensors.items():
        if LINEAR.search(name) and not re.search(plain, name):
            start = name.removesuffix("weight")
            made = make(maker, *tensor.shape)
            tensors |= {start + end: part for end, part in made.items()}
        else:
            tensors[name] = tensor
    return folders.Llama({**model.config, "quantization_config": config}, tensors)


def read_tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """The tensors of a folder; the reader of the package for NumPy has no dtypes of 8 bits."""
    stored, _ = open_tensors([folder / "model.safetensors"])
    return {name: np.array(raw(tensor)).reshape(tensor.shape) for name, tensor in stored.items()}


def change_tensors(folder: pathlib.Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Let `change` modify the tensors of a folder."""
    tensors = read_tensors(folder)
    change(tensors)
    folders.save_tensors(tensors, folder / "model.safetensors")


def write(
    format: str, name: str, plain: str = "(?!)", seed: int = 0, **config: Any
) -> pathlib.Path:
    """The folder of a Llama with packed weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, **config}
    made = packed(folders.random_llama(seed, **sizes), format, plain, seed)
    folder = folders.ROOT / name
    made.save_pretrained(folder)
    return folder
