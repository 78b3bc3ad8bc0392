"""Small GGUF files of random models, written with the package gguf."""

from __future__ import annotations

import pathlib
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

VOCAB, SIZE, WIDE, LAYERS, HEADS, KEYS = 320, 256, 512, 2, 4, 2
HEAD = {"llama": 64, "qwen2": 64, "qwen3": 128}  # the default of each architecture
_K = {Kind.Q4_K: 144, Kind.Q6_K: 210}
"""The bytes of a block of 256 numbers, for kinds that the package reads and does not write."""


def blocks(rng: np.random.Generator, shape: tuple[int, ...], kind: Kind) -> np.ndarray:
    """Random blocks of a matrix whose numbers are about as large as those of a model."""
    rows, count = shape[0], shape[1] // 256
    made = rng.integers(0, 256, (rows, count, _K[kind])).astype(np.uint8)
    size = np.float16(2e-4 if kind == Kind.Q4_K else 3e-5)
    scale = (size * (0.5 + rng.random((rows, count, 1)))).astype(np.float16).view(np.uint8)
    if kind == Kind.Q4_K:
        made[..., :2] = scale
        made[..., 2:4] = (np.float16(8 * size) * np.ones((rows, count, 1), np.float16)).view("u1")
    else:
        made[..., 208:] = scale
    return made.reshape(rows, -1)


def names(architecture: str) -> dict[str, tuple[int, ...]]:
    """The tensors of a model, with their shapes in NumPy."""
    made: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, SIZE), "output_norm.weight": (SIZE,),
        "output.weight": (VOCAB, SIZE),
    }  # fmt: skip
    size = HEAD[architecture]
    for layer in range(LAYERS):
        own: dict[str, tuple[int, ...]] = {
            "attn_q.weight": (HEADS * size, SIZE), "attn_k.weight": (KEYS * size, SIZE),
            "attn_v.weight": (KEYS * size, SIZE), "attn_output.weight": (SIZE, HEADS * size),
            "ffn_gate.weight": (WIDE, SIZE), "ffn_up.weight": (WIDE, SIZE),
            "ffn_down.weight": (SIZE, WIDE), "attn_norm.weight": (SIZE,),
            "ffn_norm.weight": (SIZE,),
        }  # fmt: skip
        if architecture == "qwen2":
            own |= {
                "attn_q.bias": (HEADS * size,), "attn_k.bias": (KEYS * size,),
                "attn_v.bias": (KEYS * size,),
            }  # fmt: skip
        if architecture == "qwen3":
            own |= {"attn_q_norm.weight": (size,), "attn_k_norm.weight": (size,)}
        made |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    return made


def write(
    path: pathlib.Path,
    architecture: str,
    kind: Kind,
    *,
    drop: tuple[str, ...] = (),
    fields: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Write a model and return its numbers, as the package dequantises them, by the file's names.

    Args:
      path: of the file.
      architecture, kind: of the model and of its matrices; vectors are F32.
      drop: tensors that are left out.
      fields: more numbers, texts, flags and lists.
      extra: more tensors in float32.
      seed: of the numbers.
    """
    rng = np.random.default_rng(seed)
    out = gguf.GGUFWriter(str(path), architecture)
    out.add_context_length(256)
    out.add_embedding_length(SIZE)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(WIDE)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KEYS)
    out.add_key_length(HEAD[architecture])
    out.add_value_length(HEAD[architecture])
    out.add_rope_dimension_count(HEAD[architecture])
    out.add_rope_freq_base(10000.0)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_vocab_size(VOCAB)
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    for name, value in (fields or {}).items():
        if isinstance(value, bool | list):
            (out.add_bool if isinstance(value, bool) else out.add_array)(name, value)
            continue
        add = out.add_string if isinstance(value, str) else out.add_float32
        (out.add_uint32 if isinstance(value, int) else add)(name, value)
    made = {}
    for name, shape in names(architecture).items():
        if name in drop:
            continue
        own = kind if len(shape) == 2 else Kind.F32
        if own in _K:
            data = blocks(rng, shape, own)
        else:
            centre = 1.0 if "norm" in name else 0.0
            numbers = (centre + 0.1 * rng.normal(size=shape)).astype(np.float32)
            data = gguf.quants.quantize(numbers, own)
        made[name] = gguf.quants.dequantize(data, own).reshape(shape)
        out.add_tensor(name, data, raw_dtype=own)
    for name, data in (extra or {}).items():
        out.add_tensor(name, data.astype(np.float32), raw_dtype=Kind.F32)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return made
