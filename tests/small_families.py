"""A small random model of every family, of which `tests/fixtures/families*.npz` have the logits.

The weights are drawn by the name of each tensor, so that only configurations, shapes and what
transformers computes are stored.
"""

from __future__ import annotations

import functools
import json
import pathlib
import zlib
from typing import Any

import delta_families
import dense_families
import expert_families
import folders
import gemma4_families
import latent_families
import numpy as np
import recurrent_families

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
VOCAB, LENGTH = 40, 200
PLACES = (0, 1, 2, 9, 10, 11, 47, 96, 127, 150, 198, 199)
"""The positions of which logits and features are stored."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 4, "max_position_embeddings": 256, "bos_token_id": 0,
    "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 6}
EXPERTS = {**HEADS, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
GEMMA = {**HEADS, "query_pre_attn_scalar": 7, "sliding_window": 9, "num_hidden_layers": 2}
OPT = {
    "vocab_size": VOCAB, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 1,
    "num_attention_heads": 4, "max_position_embeddings": 256, "word_embed_proj_dim": 16,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
GPT2 = {
    "vocab_size": VOCAB, "n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 256,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0,
        "original_max_position_embeddings": 64}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
    "short_factor": [1.1, 2.0], "long_factor": [3.0, 6.0],
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}

_FIRST: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**HEADS, "num_hidden_layers": 2}),
    "llama, biases, llama3 rope": (
        "llama",
        {**GROUPED, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3,
         "rms_norm_eps": 0.1},
    ),
    "llama, tied, linear rope": (
        "llama",
        {**SIZES, "num_key_value_heads": 1, "tie_word_embeddings": True,
         "rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 4.0}},
    ),
    "mistral": ("mistral", {**GROUPED, "sliding_window": 11}),
    "mixtral": ("mixtral", {**GROUPED, "num_local_experts": 4, "sliding_window": 50}),
    "qwen2, windows above": (
        "qwen2",
        {**GROUPED, "num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 9,
         "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen2, yarn": ("qwen2", {**GROUPED, "rope_parameters": YARN}),
    "qwen3": ("qwen3", {**HEADS, "attention_bias": True}),
    "qwen3_moe, a dense layer": (
        "qwen3_moe",
        {**EXPERTS, "num_hidden_layers": 2, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "qwen3_moe, not renormalised": (
        "qwen3_moe",
        {**EXPERTS, "norm_topk_prob": False, "use_sliding_window": True, "sliding_window": 40},
    ),
    "gemma": ("gemma", HEADS),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3_text": (
        "gemma3_text",
        {**GEMMA, "layer_types": ["sliding_attention", "full_attention"],
         "rope_parameters": TWO_ROPES},
    ),
    "phi3": ("phi3", GROUPED),
    "phi3, long rope": (
        "phi3",
        {**GROUPED, "hidden_size": 32, "max_position_embeddings": 4096, "sliding_window": 100,
         "original_max_position_embeddings": 512, "partial_rotary_factor": 0.5,
         "rope_parameters": LONG},
    ),
    "opt": ("opt", OPT),
    "opt, projected": ("opt", {**OPT, "word_embed_proj_dim": 8, "do_layer_norm_before": False}),
    "gpt2": ("gpt2", GPT2),
    "gpt_neox": ("gpt_neox", {**SIZES, "num_attention_heads": 2}),
    "gpt_neox, in turn": (
        "gpt_neox",
        {**SIZES, "num_attention_heads": 2, "use_parallel_residual": False, "attention_bias": False,
         "hidden_act": "gelu_fast", "tie_word_embeddings": True},
    ),
    "smollm3": (
        "smollm3",
        {**GROUPED, "num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 40,
         "no_rope_layer_interval": 2, "attention_bias": True},
    ),
    "olmo2": ("olmo2", {**GROUPED, "attention_bias": True}),
}  # fmt: skip

_LATER = {
    "dense": dense_families.cases(SIZES, original=64),
    "delta": delta_families.cases(SIZES),
    "experts": expert_families.cases(SIZES, original=64),
    "gemma4": gemma4_families.cases(SIZES),
    "recurrent": recurrent_families.cases(SIZES),
    "latent": latent_families.cases(SIZES, original=64),
}
"""Name of a group -> family -> name of a case -> configuration."""

GROUPS = {"": _FIRST} | {
    group: {
        f"{family}, {case}": (family, config)
        for family, cases in families.items()
        for case, config in cases.items()
    }
    for group, families in _LATER.items()
}
"""Name of a group -> name of a case -> family and configuration for transformers.

Each group has a pair of files of its own.
"""

CONFIGS = {case: made for group in GROUPS.values() for case, made in group.items()}
"""Name -> family and configuration for transformers."""


def text() -> np.ndarray:
    """[1, LENGTH]"""
    return folders.random_tokens(LENGTH, 3, VOCAB)


def tensor(case: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The weights of a name; norms are near their neutral value."""
    rng = np.random.default_rng([zlib.crc32(case.encode()), zlib.crc32(name.encode())])
    drawn = rng.standard_normal(shape, np.float32)
    if len(shape) > 1:
        return drawn * np.float32(0.35)
    neutral = ("norm" in name or ".ln_" in name) and name.endswith("weight")
    neutral &= not case.startswith("gemma") or case.startswith("gemma4")
    neutral |= name.endswith(("layer_scalar", "scale"))
    return drawn * np.float32(0.3) + np.float32(neutral)


def files(group: str) -> tuple[pathlib.Path, pathlib.Path]:
    """The files of a group: of configurations and shapes, and of what was computed."""
    name = f"families-{group}" if group else "families"
    return FIXTURES / f"{name}.json", FIXTURES / f"{name}.npz"


@functools.cache
def stored() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """For each case its configuration and the shapes of its tensors, and what was computed."""
    described, arrays = {}, {}
    for group in GROUPS:
        facts, numbers = files(group)
        described |= json.loads(facts.read_text())
        with np.load(numbers) as file:
            arrays |= dict(file)
    return described, arrays


@functools.cache
def folder(case: str) -> pathlib.Path:
    """The folder of a case."""
    made = stored()[0][case]
    tensors = {name: tensor(case, name, tuple(shape)) for name, shape in made["shapes"].items()}
    named = folders.ROOT / "family-{}".format(case.replace(" ", "-").replace(",", ""))
    folders.Llama(made["config"], tensors).save_pretrained(named)
    return named
