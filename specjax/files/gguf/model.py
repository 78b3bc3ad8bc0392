"""The model in a GGUF file: its configuration and its tensors as those of a folder."""

from __future__ import annotations

import functools
import math
import os
import pathlib
import re
import stat
from typing import Any

import numpy as np

from specjax._internal.checks import shown
from specjax.files.gguf.blocks import stored_of
from specjax.files.gguf.header import Header, read_gguf
from specjax.files.gguf.vocabulary import tokenizer_files
from specjax.files.headers import Stored
from specjax.models import Config

_FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_FIELDS = {
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size",
    "rope.dimension_count", "rope.freq_base", "attention.head_count", "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.finetuned", "attention.causal",
}  # fmt: skip
"""The fields of an architecture; others may change what is computed, and are refused."""

_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}  # fmt: skip
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)$")
_ROPE = "rope_freqs.weight"
_CURE = "pass the safetensors folder of this model"


def configuration_of(file: pathlib.Path) -> Config:
    """Returns the configuration as config.json of transformers has it.

    Raises:
      ValueError: an architecture, or a field of it, that is not supported.
      OSError: the file cannot be read.
    """
    header = _opened(file)
    fields, kind = header.fields, header.fields.get("general.architecture")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise ValueError(
            f"{file} holds the architecture {shown(kind)}; of GGUF files specjax reads "
            f"{', '.join(_FAMILIES)}: {_CURE}"
        )
    own = {name.removeprefix(f"{kind}."): v for name, v in fields.items() if name[: len(kind) + 1]
           == f"{kind}."}  # fmt: skip
    unknown = sorted(name for name in own if name not in _FIELDS and own[name])
    if unknown:
        raise ValueError(
            f"{file} has fields that specjax does not read for {kind}: "
            f"{', '.join(map(shown, unknown))}; {_CURE}"
        )
    if fields.get("split.count", 1) not in (0, 1):
        raise ValueError(
            f"{file} is one of {shown(fields['split.count'])} parts: join them with llama.cpp's "
            "gguf-split --merge"
        )

    def number(name: str, default: Any = None) -> Any:
        value = own.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{file}: {kind}.{name} is {shown(value)}; it must be a number")
        return value

    heads, size = number("attention.head_count"), number("embedding_length")
    table = header.entries.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ValueError(f"{file} has no matrix token_embd.weight: download it again")
    turned = number("rope.dimension_count", number("attention.key_length", size // max(heads, 1)))
    head_dim = number("attention.key_length", turned)
    if turned != head_dim or number("attention.value_length", head_dim) != head_dim:
        raise ValueError(
            f"{file} has heads of {head_dim} numbers, of which {turned} are rotated, and values of "
            f"{number('attention.value_length', head_dim)}; specjax reads files where they are "
            f"equal: {_CURE}"
        )
    bias = "blk.0.attn_q.bias" in header.entries
    made: dict[str, Any] = {
        "architectures": [_FAMILIES[kind]],
        "model_type": kind,
        "vocab_size": table.shape[0],
        "hidden_size": size,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": float(np.float32(number("attention.layer_norm_rms_epsilon"))),
        "rope_theta": number("rope.freq_base", 10000.0),
        "rope_scaling": _scaling(file, own, header, head_dim, number),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in header.entries,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "dtype": "float16",
    }
    if kind == "qwen2":
        made |= {"use_sliding_window": False}
    else:
        made |= {"attention_bias": bias}
    return made


def _scaling(
    file: pathlib.Path, own: dict[str, Any], header: Header, head_dim: int, number: Any
) -> Config | None:
    """Returns the scaling of the rotations."""
    if _ROPE in header.entries:
        return _llama3(file, header, head_dim, number("rope.freq_base", 10000.0))
    kind = own.get("rope.scaling.type", "none")
    if kind in ("none", ""):
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"{file}: the scaling of rotations {shown(kind)} is not read: {_CURE}")
    made = {"rope_type": kind, "factor": number("rope.scaling.factor")}
    if kind == "yarn":
        length = number("rope.scaling.original_context_length")
        made["original_max_position_embeddings"] = length
    return made


def _llama3(file: pathlib.Path, header: Header, head_dim: int, base: float) -> Config:
    """Returns the scaling of Llama 3, for which the file has the factors of all frequencies."""
    stored = stored_of(file, _ROPE, header.entries[_ROPE], header, None)
    factors = np.asarray(stored.map(), np.float64).reshape(-1)
    if len(factors) == head_dim // 2:
        lengths = 2 * math.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
        for factor in (8.0, 32.0):
            blend = (8192 / lengths - 1) / 3
            between = 1 / ((1 - blend) / factor + blend)
            known = np.where(lengths < 2048, 1, np.where(lengths > 8192, factor, between))
            if np.allclose(factors, known, rtol=1e-4):
                return {
                    "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
                }  # fmt: skip
    raise ValueError(f"{file}: {_ROPE} has other factors than Llama 3.1 and 3.2: {_CURE}")


def tensors_of(file: pathlib.Path) -> tuple[dict[str, Stored], list[str]]:
    """Returns the tensors by the names that transformers has, and a line for each fault."""
    header, made, faults = _opened(file), {}, []
    kind = header.fields.get("general.architecture")
    heads = header.fields.get(f"{kind}.attention.head_count")
    keys = header.fields.get(f"{kind}.attention.head_count_kv", heads)
    of_rows = {"attn_q": heads, "attn_k": keys} if kind == "llama" else {}
    for name, entry in header.entries.items():
        if name == _ROPE:
            continue
        layer = _LAYER.match(name)
        plain = _WHOLE.get(name, name)
        if layer is not None and layer[2] in _NAMES:
            plain = f"model.layers.{layer[1]}.{_NAMES[layer[2]]}.{layer[3]}"
        try:
            turned = None if layer is None else of_rows.get(layer[2])
            made[plain] = stored_of(file, name, entry, header, turned)
        except ValueError as error:
            faults.append(str(error))
    return made, faults


def tokenizer_in(file: pathlib.Path) -> dict[str, bytes]:
    """Returns the files of the tokenizer in a GGUF file, by their names in a folder; {}: none.

    Raises:
      ValueError: the tokenizer is of a kind that is not read, or is damaged.
      OSError: the file cannot be read.
    """
    return tokenizer_files(file, _opened(file))


@functools.lru_cache(maxsize=4)
def _read(file: pathlib.Path, size: int, changed: int) -> Header:
    del size, changed  # they are in the key: the file may have been replaced
    return read_gguf(file)


def _opened(file: pathlib.Path) -> Header:
    kind = os.stat(file)
    if not stat.S_ISREG(kind.st_mode) or kind.st_size < 24:
        raise ValueError(f"{file} is no GGUF file: download it again")
    return _read(file, kind.st_size, kind.st_mtime_ns)
