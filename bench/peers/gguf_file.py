"""Write a Llama folder as the GGUF file that llama.cpp reads."""

from __future__ import annotations

import importlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from safetensors import safe_open

TYPES = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
"""The type of matrices in each precision.

Vectors stay in float32, and rows that do not divide into blocks of 32 become float16.
"""

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write(folder: pathlib.Path, path: pathlib.Path, dtype: str) -> None:
    """Write the model of `folder` to `path`, without its tokenizer.

    Raises:
      ValueError: if it is not a plain Llama: another family, biases, or scaled rotations.
    """
    gguf: Any = importlib.import_module("gguf")
    config = json.loads((folder / "config.json").read_text())
    _check(config)
    heads, size = config["num_attention_heads"], config["hidden_size"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or size // heads
    unfinished = path.with_suffix(".part")
    out = gguf.GGUFWriter(str(unfinished), "llama")
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(size)
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_key_length(head_dim)
    out.add_value_length(head_dim)
    out.add_rope_dimension_count(head_dim)
    out.add_rope_freq_base(config.get("rope_theta", 10000.0))
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_vocab_size(config["vocab_size"])
    out.add_tokenizer_model("no_vocab")
    wanted = gguf.GGMLQuantizationType[TYPES[dtype]]
    for name, tensor in _tensors(folder):
        if "q_proj" in name or "k_proj" in name:
            tensor = _interleaved(tensor, heads if "q_proj" in name else kv_heads)
        kind = wanted if tensor.ndim > 1 else gguf.GGMLQuantizationType.F32
        if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = gguf.GGMLQuantizationType.F16  # as llama.cpp's own tool does
        out.add_tensor(_name(name), gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    unfinished.rename(path)


def _check(config: dict[str, Any]) -> None:
    scaled = config.get("rope_scaling") or (config.get("rope_parameters") or {}).get("factor")
    biased = config.get("attention_bias") or config.get("mlp_bias")
    if config["model_type"] != "llama" or scaled or biased:
        raise ValueError(
            f"a {config['model_type']} model with its settings is not written as GGUF here; "
            "measure a plain Llama"
        )


def _tensors(folder: pathlib.Path) -> Iterator[tuple[str, np.ndarray]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name).float().numpy()


def _interleaved(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Rows in the order in which llama.cpp rotates them: neighbours instead of halves."""
    rows, columns = tensor.shape
    halves = tensor.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def _name(name: str) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"
