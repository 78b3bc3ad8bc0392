"""Configurations of small models with gated delta nets, for transformers."""

from __future__ import annotations

from typing import Any

_Cases = dict[str, dict[str, Any]]


def cases(sizes: dict[str, Any]) -> dict[str, _Cases]:
    """Family -> name of a case -> configuration; `sizes` are those of a model with four heads.

    With a small epsilon the norm after a delta net may enlarge rounding by 10^4, where its output
    is near 0.
    """
    delta = {
        **sizes, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 3,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
        "linear_value_head_dim": 5,
    }  # fmt: skip
    experts = {
        **delta, "rms_norm_eps": 0.05, "num_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 12, "shared_expert_intermediate_size": 10, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    return {
        "qwen3_next": {
            "all sparse": experts,
            "a dense layer, not renormalised": {
                **experts, "mlp_only_layers": [0], "norm_topk_prob": False,
            },
        },
        "qwen3_5_moe_text": {
            "untied": experts,
            "tied": {**experts, "tie_word_embeddings": True, "linear_num_key_heads": 4},
        },
        "qwen3_5_text": {
            "in turn": {
                **delta, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            },
            "tied, bias": {
                **delta, "num_hidden_layers": 2, "full_attention_interval": 2,
                "attention_bias": True, "tie_word_embeddings": True, "linear_conv_kernel_dim": 3,
                "linear_num_key_heads": 4,
                "rope_parameters": {
                    "rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5
                },
            },
        },
    }  # fmt: skip
