"""Cases of folders with packed weights: parts that are missing, misshapen or not finite."""

from __future__ import annotations

import json
import pathlib
import random
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np

import specjax
from specjax.files import open_tensors
from specjax.files.gguf.header import read_gguf
from tests import gguf_files
from tests.fuzz import bases, values
from tests.fuzz.damaged import Damaged
from tests.fuzz.folders import changed_weights, check_of
from tests.fuzz.law import Case
from tests.packed_formats import FORMATS, LINEAR, Maker

_WEIGHTS, _GGUF = "model.safetensors", "model.gguf"
_SIZES = {"hidden_size": 32, "mlp_size": 64, "num_kv_heads": 2, "head_dim": 16}
_EXPERTS = {
    "qwen3_moe": {"expert_size": 48},
    "gpt_oss": {"expert_size": 64, "mlp_size": 64, "hidden_size": 64},
}
_SCALES = ("scale", "scales", "scale_inv", "scale_2", "global_scale")
_OPTIONAL = ("g_idx", "bias")
_OWN = {
    "bits": 4, "group_size": 16, "desc_act": True, "sym": True, "zero_point": True,
    "weight_block_size": [32, 16], "format": "pack-quantized", "quant_method": "gptq",
    "checkpoint_format": "gptq_v2", "version": "gemm", "quant_algo": "FP8", "scale_fmt": "ue8m0",
    "ignore": ["lm_head"], "modules_to_not_convert": ["lm_head"], "exclude_modules": [],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}},
}  # fmt: skip

_TOKENIZER = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a", "b", "c", "ab", "▁a", "abc"],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1, 4],
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.chat_template": "{{ messages }}",
}


def _mxfp4(maker: Maker, tensors: dict[str, np.ndarray]) -> None:
    """The stacks of gpt-oss, [E, in, out], as blocks and exponents."""
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, into, out = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = maker.codes(experts, out, into // 32, 16, most=256)
        tensors[f"{name}_scales"] = maker.codes(experts, out, into // 32, most=3) + np.uint8(122)


def _in(format: str) -> Callable[[Maker, dict[str, np.ndarray]], None]:
    make = FORMATS[format][0]

    def change(maker: Maker, tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if LINEAR.search(name)]:
            shape, start = tensors.pop(name).shape, name.removesuffix("weight")
            tensors |= {start + end: part for end, part in make(maker, *shape).items()}

    return change


_HOMES: dict[str, tuple[str, dict[str, Any], Callable[[Maker, dict[str, np.ndarray]], None]]] = {
    **{format: ("llama", config, _in(format)) for format, (_, config) in FORMATS.items()},
    "experts": ("qwen3_moe", FORMATS["fp8"][1], _in("fp8")),
    "gpt-oss": ("gpt_oss", {"quant_method": "mxfp4"}, _mxfp4),
}
"""Name -> family, configuration of the quantisation, and what packs the tensors of the family."""


class PackedWeights:
    """A folder in each format, with another configuration, or with parts that do not fit."""

    def __init__(self, root: pathlib.Path) -> None:
        (root / "outside").mkdir()
        self.homes = []
        for name, (family, quantisation, change) in _HOMES.items():
            folder = bases.write(family, root / name, **{**_SIZES, **_EXPERTS.get(family, {})})
            stored, _ = open_tensors([folder / _WEIGHTS])
            tensors = {name: np.array(tensor.map()) for name, tensor in stored.items()}
            change(Maker(), tensors)
            (folder / _WEIGHTS).write_bytes(content_of(*parts_of(tensors)))
            config = json.loads((folder / "config.json").read_text())
            config["quantization_config"] = quantisation
            (folder / "config.json").write_text(json.dumps(config))
            specjax.load(folder)
            self.homes.append(Damaged(folder, root / "outside"))

        folder = root / "gguf"
        folder.mkdir()
        gguf_files.write(folder / _GGUF, "llama", gguf.GGMLQuantizationType.Q4_0, fields=_TOKENIZER)
        specjax.load(folder / _GGUF)
        self.file = Damaged(folder, root / "outside")
        entries = read_gguf(folder / _GGUF).entries
        self.header = min(entry.start for entry in entries.values())

    def case(self, rng: random.Random) -> Case:
        if rng.random() < 0.2:
            return self.gguf_case(rng)
        home, refused = rng.choice(self.homes), False
        home.reset()
        act = rng.random()
        if act < 0.35:
            config = json.loads(home.files["config.json"])
            inner = config["quantization_config"]
            if rng.random() < 0.5:
                field = rng.choice(sorted(_OWN))
                inner[field] = values.near(rng, _OWN[field]) if rng.random() < 0.5 else _OWN[field]
            changed = values.changed(rng, inner, rng.choice((0, 1, 1, 2)))
            config["quantization_config"] = changed
            home.put("config.json", values.text_of(rng, config))
        elif act < 0.55:
            home.put(_WEIGHTS, changed_weights(rng, home.files[_WEIGHTS]))
        else:
            content, refused = spoiled(rng, home.files[_WEIGHTS])
            home.put(_WEIGHTS, content)
        dequantise = rng.random() < 0.3
        return Case(
            lambda: specjax.load(home.folder, dequantise=dequantise),
            (str(home.folder),), check_of(rng), refused,
        )  # fmt: skip

    def gguf_case(self, rng: random.Random) -> Case:
        """A file with other bytes in its header, or without its end, or what is no file."""
        home = self.file
        home.reset()
        content, refused = bytearray(home.files[_GGUF]), False
        path = home.folder / _GGUF
        if rng.random() < 0.1:
            # A file with zeros behind its end is whole.
            refused = home.strange(rng, _GGUF) and path.is_symlink()
            path = home.folder
        else:
            for _ in range(rng.choice((1, 1, 2, 4))):
                at = rng.randrange(self.header)
                content[at] = rng.choice((0, 1, 2, 9, 255, rng.randrange(256)))
            if rng.random() < 0.2:
                content = content[: rng.randrange(len(content))]
            home.put(_GGUF, bytes(content))
        return Case(
            lambda: specjax.load(path), (str(home.folder), "model.gguf"), check_of(rng), refused
        )


def parts_of(tensors: dict[str, np.ndarray]) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a safetensors file."""
    kinds = {
        "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "int64": "I64",
        "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3",
    }  # fmt: skip
    header, data = {}, b""
    for name, array in sorted(tensors.items(), key=lambda item: -item[1].itemsize):
        content = np.ascontiguousarray(array).tobytes()
        offsets = [len(data), len(data) + len(content)]
        kind = kinds[array.dtype.name]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": offsets}
        data += content
    return header, data


def content_of(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def spoiled(rng: random.Random, content: bytes) -> tuple[bytes, bool]:
    """A file with a part of one packed matrix changed, and whether it must be refused."""
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    matrices = [name for name in header if "_proj" in name]
    name = rng.choice(matrices)
    begin, end = header[name]["data_offsets"]
    act = rng.random()
    if act < 0.2:
        header.pop(name)
        return content_of(header, data), not name.endswith(_OPTIONAL)
    if act < 0.45:
        scales = [name for name in matrices if name.endswith(_SCALES)]
        name = rng.choice(scales)
        begin, end = header[name]["data_offsets"]
        size = {"F32": 4, "F16": 2, "BF16": 2}.get(header[name]["dtype"], 1)
        at = begin + size * rng.randrange((end - begin) // size)
        data = data[:at] + b"\xff" * size + data[at + size :]
        return content_of(header, data), True
    other = rng.choice(matrices)
    if act < 0.6:  # the part of another matrix
        header[name] = {**header[other]}
        return content_of(header, data), False
    if act < 0.7:
        start = name.rpartition(".")[0]
        ends = ("qweight", "scales", "weight_scale", "weight", "weight_packed", "weight_zero_point")
        header[f"{start}.{rng.choice(ends)}"] = {**header[other]}
        return content_of(header, data), False
    if act < 0.8:
        return content_of(header, data[: rng.randrange(len(data))]), True
    if act < 0.9:
        at = rng.randrange(len(data))
        data = (
            data[:at]
            + bytes(rng.randrange(256) for _ in range(min(64, len(data) - at)))
            + (data[at + 64 :])
        )
        return content_of(header, data), False
    shape = header[name]["shape"]
    header[name]["shape"] = rng.choice(
        (shape[::-1], [1, *shape], [end - begin], [2, -1], [0, *shape], shape[:-1])
    )
    return content_of(header, data), False
