"""Configurations of small models of the families with experts, for transformers."""

from __future__ import annotations

from typing import Any

_Cases = dict[str, dict[str, Any]]


def cases(sizes: dict[str, Any], original: int) -> dict[str, _Cases]:
    """Family -> name of a case -> configuration.

    `sizes` are those of a model with four heads, and `original` is the context before a rope was
    scaled, which must be shorter than the texts.
    """
    sizes = {**sizes, "num_key_value_heads": 2, "num_hidden_layers": 2, "rms_norm_eps": 0.05}
    heads = {**sizes, "head_dim": 8}
    local = {"num_local_experts": 6, "num_experts_per_tok": 2}
    qwen = {
        **sizes, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 10,
    }  # fmt: skip
    glm = {
        **heads, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
        "first_k_dense_replace": 1,
    }  # fmt: skip
    ernie = {
        **sizes, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 12,
        "moe_num_shared_experts": 2,
    }  # fmt: skip
    llama4 = {
        **heads, **local, "intermediate_size_mlp": 20, "num_hidden_layers": 3,
        "no_rope_layers": [1, 0, 1], "attention_chunk_size": 9, "floor_scale": 40,
        "attn_scale": 0.3,
    }  # fmt: skip
    yarn = {
        "rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "truncate": False,
        "original_max_position_embeddings": original,
    }  # fmt: skip
    return {
        "qwen2_moe": {
            "a dense layer": {**qwen, "mlp_only_layers": [0], "norm_topk_prob": True},
            "windows in turn": {
                **qwen, "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 9,
                "max_window_layers": 2, "decoder_sparse_step": 2, "qkv_bias": False,
            },
        },
        "glm4_moe": {
            "norms of heads, biases": {
                **glm, "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.7,
            },
            "groups": {
                **glm, "n_group": 3, "topk_group": 2, "n_shared_experts": 2,
                "first_k_dense_replace": 0, "norm_topk_prob": False,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e3,
                                    "partial_rotary_factor": 0.25},
            },
        },
        "llama4_text": {
            "one expert": {
                **llama4, "num_experts_per_tok": 1, "moe_layers": [0, 2],
                "rope_parameters": {
                    "rope_type": "llama3", "rope_theta": 1e3, "factor": 4.0,
                    "low_freq_factor": 1.0, "high_freq_factor": 1.0,
                    "original_max_position_embeddings": original,
                },
            },
            "two experts, no norms, biases": {
                **llama4, "num_hidden_layers": 2, "no_rope_layers": [0, 1], "use_qk_norm": False,
                "attention_bias": True, "tie_word_embeddings": True,
                "attn_temperature_tuning": False, "interleave_moe_layer_step": 2,
                "layer_types": ["chunked_attention", "full_attention"],
            },
        },
        "phimoe": {
            "biases": {
                **heads, **local, "attention_bias": True, "lm_head_bias": True,
                "router_jitter_noise": 0.3, "rope_parameters": {
                    "rope_type": "default", "rope_theta": 1e3
                },
            },
            "tied, a window": {
                **sizes, **local, "tie_word_embeddings": True, "sliding_window": 20,
                "router_jitter_noise": 0.2,
            },
        },
        "minimax_m2": {
            "half of a head turns": {**heads, **local, "rotary_dim": 4},
        },
        "gpt_oss": {
            "windows in turn": {
                **heads, **local, "sliding_window": 9, "rope_parameters": yarn,
                "swiglu_limit": 0.5,
            },
            "all slide, no biases": {
                **heads, **local, "sliding_window": 20, "attention_bias": False,
                "layer_types": ["sliding_attention"] * 2, "swiglu_alpha": 1.2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
        "ernie4_5_moe": {
            "a dense layer": ernie,
            "every other layer": {
                **ernie, "num_hidden_layers": 4, "moe_layer_interval": 2, "head_dim": 6,
                "moe_layer_end_index": 3, "moe_num_shared_experts": 0,
                "tie_word_embeddings": False,
            },
        },
    }  # fmt: skip
