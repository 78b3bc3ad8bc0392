"""Configurations of small Gemma 4 models, for transformers."""

from __future__ import annotations

from typing import Any

_Cases = dict[str, dict[str, Any]]

_TURNS = ["sliding_attention", "full_attention"]


def cases(sizes: dict[str, Any]) -> dict[str, _Cases]:
    """Family -> name of a case -> configuration; `sizes` are those of a model with four heads."""
    # Larger weights make float32 alone differ by 1e-4 from float64.
    plain = {
        **sizes, "initializer_range": 0.06, "num_key_value_heads": 2, "head_dim": 8,
        "global_head_dim": 16, "sliding_window": 9, "num_hidden_layers": 3,
        "layer_types": [*_TURNS, "full_attention"],
        "final_logit_softcapping": 20.0,
    }  # fmt: skip
    tables = {"vocab_size_per_layer_input": sizes["vocab_size"], "hidden_size_per_layer_input": 6}
    keys = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    rope = {"rope_type": "proportional", "rope_theta": 1e3, "partial_rotary_factor": 0.5}
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {**rope, "factor": 2.0},
    }
    return {
        "gemma4_text": {
            "as E2B": {
                **plain, **tables, "num_hidden_layers": 5, "layer_types": [*_TURNS * 2, _TURNS[1]],
                "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
            },
            "as 31B": {**plain, **keys, "hidden_size_per_layer_input": 0},
            "as 26B": {
                **plain, **keys, "hidden_size_per_layer_input": 0, "enable_moe_block": True,
                "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 12,
            },
            "all of it": {
                **plain, **tables, **keys, "num_hidden_layers": 4, "layer_types": _TURNS * 2,
                "num_kv_shared_layers": 2, "attention_bias": True, "tie_word_embeddings": False,
                "rope_parameters": ropes, "hidden_activation": "silu",
            },
        },
        "gemma4_unified_text": {
            "as 12B": {**plain, **keys},
            "shared": {**plain, "num_kv_shared_layers": 1},
        },
    }  # fmt: skip
