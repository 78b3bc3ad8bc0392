"""Configurations of small models of the families with latent attention, for transformers."""

from __future__ import annotations

from typing import Any

_Cases = dict[str, dict[str, Any]]


def cases(sizes: dict[str, Any], original: int) -> dict[str, _Cases]:
    """Family -> name of a case -> configuration.

    `sizes` are those of a model with four heads, and `original` is the context before a rope was
    scaled, which must be shorter than the texts.
    """
    sizes = {
        **sizes, "num_hidden_layers": 2, "kv_lora_rank": 10, "q_lora_rank": 9,
        "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7, "rms_norm_eps": 0.05,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
        "n_shared_experts": 1, "routed_scaling_factor": 1.7, "num_key_value_heads": 4,
    }  # fmt: skip
    yarn = {
        "rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "mscale": 1.0,
        "original_max_position_embeddings": original, "mscale_all_dim": 0.7,
    }  # fmt: skip
    plain = {"rope_type": "default", "rope_theta": 1e3}
    grouped = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
    alone = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    growing = {**yarn, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
    return {
        "deepseek_v2": {
            "yarn": {**sizes, "rope_parameters": yarn, "first_k_dense_replace": 1},
            "groups": {
                **sizes, **grouped, "rope_parameters": yarn, "num_experts_per_tok": 3,
                "topk_method": "group_limited_greedy",
            },
            "whole queries": {**sizes, "rope_parameters": plain, "q_lora_rank": None},
        },
        "deepseek_v3": {
            "yarn, groups": {**sizes, **grouped, "rope_parameters": yarn},
            "halves, biases": {
                **sizes, **grouped, "rope_parameters": plain, "rope_interleave": False,
                "attention_bias": True, "norm_topk_prob": False, "q_lora_rank": None,
            },
        },
        "kimi_k2": {
            "one group": {
                **sizes, **alone, "n_shared_experts": 2, "rope_parameters": {**yarn, "mscale": 0.0},
            },
        },
        "glm4_moe_lite": {
            "plain": {**sizes, **alone, "rope_parameters": plain},
            "a dense layer last": {
                **sizes, **grouped, "rope_parameters": plain, "attention_bias": True,
                "mlp_layer_types": ["sparse", "dense"],
            },
        },
        "mistral4": {
            "growing queries": {**sizes, **alone, "rope_parameters": growing},
            "groups": {**sizes, **grouped, "rope_parameters": {**growing, "mscale_all_dim": 0.0}},
        },
    }  # fmt: skip
