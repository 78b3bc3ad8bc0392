"""Configurations of small models of the families with a recurrent state, for transformers."""

from __future__ import annotations

from typing import Any

_Cases = dict[str, dict[str, Any]]


def cases(sizes: dict[str, Any]) -> dict[str, _Cases]:
    """Family -> name of a case -> configuration; `sizes` are those of a model with four heads."""
    hidden = sizes["hidden_size"]
    grouped = {**sizes, "num_key_value_heads": 2}
    mamba = {
        "mamba_n_heads": 4, "mamba_d_head": hidden // 2, "mamba_expand": 2, "mamba_d_state": 6,
        "mamba_n_groups": 2, "mamba_d_conv": 4, "mamba_chunk_size": 32,
    }  # fmt: skip
    granite = {
        **grouped, **mamba, "shared_intermediate_size": sizes["intermediate_size"],
        "num_local_experts": 0, "embedding_multiplier": 3.0, "residual_multiplier": 0.7,
        "attention_multiplier": 0.4, "logits_scaling": 0.6,
    }  # fmt: skip
    falcon = {
        **grouped, **mamba, "mamba_d_head": hidden // 8, "mamba_d_ssm": hidden // 2,
        "mlp_multipliers": [0.8, 1.3], "ssm_multipliers": [0.9, 1.2, 0.7, 1.4, 0.6],
        "embedding_multiplier": 2.0, "lm_head_multiplier": 1.7, "key_multiplier": 0.6,
        "attention_in_multiplier": 1.1, "attention_out_multiplier": 0.9,
        "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8,
    }  # fmt: skip
    nemotron = {
        **grouped, "head_dim": hidden // 4 + 2, "mamba_num_heads": 4, "mamba_head_dim": 6,
        "ssm_state_size": 5, "n_groups": 2, "conv_kernel": 4, "chunk_size": 32, "expand": 1,
    }  # fmt: skip
    nemotron.pop("num_hidden_layers")
    moe = {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
        "moe_shared_expert_intermediate_size": 10, "layer_norm_epsilon": 0.05,
    }  # fmt: skip
    olmo = {
        **grouped, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 3, "linear_value_head_dim": 6,
    }  # fmt: skip
    chosen = {
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_eps": 0.05,
    }  # fmt: skip
    kimi = {
        **sizes, "num_key_value_heads": 4, "kv_lora_rank": 10, "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4, "v_head_dim": 7, "rms_norm_eps": 0.05, "num_experts": 8,
        "num_experts_per_token": 2, "moe_intermediate_size": 12, "num_hidden_layers": 2,
    }  # fmt: skip
    lfm2 = {**grouped, "block_multiple_of": 8}
    return {
        "kimi_linear": {
            "a dense layer": {
                **kimi, "num_hidden_layers": 3, "linear_attn_config": {
                    "full_attn_layers": [2], "kda_layers": [1, 3], "num_heads": 3, "head_dim": 5,
                    "short_conv_kernel_size": 4,
                },
            },
            "groups, biases": {
                **kimi, "layer_types": ["full_attention", "linear_attention"],
                "mlp_layer_types": ["sparse", "dense"], "num_expert_group": 4, "topk_group": 2,
                "moe_renormalize": False, "attention_bias": True, "q_lora_rank": 9,
                "num_shared_experts": 2, "linear_num_heads": 2, "linear_head_dim": 6,
                "linear_conv_kernel_dim": 3,
            },
        },
        "lfm2": {
            "conv, attention": {
                **lfm2, "num_hidden_layers": 3,
                "layer_types": ["conv", "full_attention", "conv"], "tie_word_embeddings": False,
            },
            "tied, biases, longer": {
                **lfm2, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"],
                "conv_bias": True, "conv_L_cache": 5, "block_auto_adjust_ff_dim": False,
            },
        },
        "lfm2_moe": {
            "a dense layer": {
                **grouped, **chosen, "num_hidden_layers": 3, "num_dense_layers": 1,
                "layer_types": ["conv", "full_attention", "conv"],
            },
            "all sparse, not corrected": {
                **grouped, **chosen, "num_hidden_layers": 2, "num_dense_layers": 0,
                "layer_types": ["full_attention", "conv"], "use_expert_bias": False,
                "norm_topk_prob": False, "routed_scaling_factor": 1.5,
            },
        },
        "granitemoehybrid": {
            "no rope": {
                **granite, "num_hidden_layers": 3,
                "layer_types": ["mamba", "attention", "mamba"],
            },
            "rope, biases, tied": {
                **granite, "num_hidden_layers": 2, "layer_types": ["attention", "mamba"],
                "position_embedding_type": "rope", "mamba_proj_bias": True,
                "attention_bias": True, "mamba_conv_bias": False, "tie_word_embeddings": True,
            },
            "experts": {
                **granite, "num_hidden_layers": 2, "layer_types": ["attention", "mamba"],
                "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 12,
                "shared_intermediate_size": 10, "rms_norm_eps": 0.05,
            },
            "attention": {
                **granite, "num_hidden_layers": 1, "layer_types": ["attention"],
                "position_embedding_type": "rope",
            },
        },
        "falcon_h1": {
            "no norm": {**falcon, "num_hidden_layers": 2},
            "norm, biases": {
                **falcon, "num_hidden_layers": 1, "mamba_rms_norm": True, "mamba_proj_bias": True,
                "projectors_bias": True, "attention_bias": True, "mlp_bias": True,
                "tie_word_embeddings": True,
            },
            "norm after the gate": {
                **falcon, "num_hidden_layers": 1, "mamba_rms_norm": True,
                "mamba_norm_before_gate": False,
            },
        },
        "olmo_hybrid": {
            "no rope": {
                **olmo, "num_hidden_layers": 2,
                "layer_types": ["full_attention", "linear_attention"],
                "rope_parameters": {"rope_type": "default", "rope_theta": None},
            },
            "rope, bias, positive": {
                **olmo, "num_hidden_layers": 2, "attention_bias": True,
                "layer_types": ["full_attention", "linear_attention"],
                "linear_allow_neg_eigval": False, "linear_conv_kernel_dim": 3,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
        "nemotron_h": {
            "no biases": {**nemotron, "hybrid_override_pattern": "M-*M"},
            "experts": {
                **nemotron, **moe, "hybrid_override_pattern": "ME*E", "n_group": 2,
                "topk_group": 1, "routed_scaling_factor": 1.7,
            },
            "narrow experts, biases": {
                **nemotron, **moe, "hybrid_override_pattern": "-E*", "mlp_bias": True,
                "moe_latent_size": 8, "norm_topk_prob": False,
            },
            "biases": {
                **nemotron, "hybrid_override_pattern": "-M*", "use_bias": True, "mlp_bias": True,
                "use_conv_bias": False,
            },
        },
    }  # fmt: skip
