"""Published targets with experts, latent attention or a recurrent state, as their files say.

The entries are the fields of `config.json` (of `text_config`, where a model also reads images) that
the family reads: huggingface.co/Qwen/Qwen3.5-4B, Qwen/Qwen3.5-35B-A3B, openai/gpt-oss-20b (in
bfloat16) and zai-org/GLM-4.7-Flash.
"""

from __future__ import annotations

from specjax import TransformerConfig
from specjax.models import FAMILIES, Config

_QWEN3_5: Config = {
    "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
    "num_attention_heads": 16, "rms_norm_eps": 1e-6, "vocab_size": 248320,
    "rope_parameters": {
        "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default",
    },
}  # fmt: skip

_PUBLISHED: dict[str, Config] = {
    "qwen3.5-4b": {
        **_QWEN3_5, "model_type": "qwen3_5_text", "hidden_size": 2560, "intermediate_size": 9216,
        "num_hidden_layers": 32, "num_key_value_heads": 4, "tie_word_embeddings": True,
    },
    "qwen3.5-35b-a3b": {
        **_QWEN3_5, "model_type": "qwen3_5_moe_text", "hidden_size": 2048,
        "num_hidden_layers": 40, "num_key_value_heads": 2, "tie_word_embeddings": False,
        "moe_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8,
        "shared_expert_intermediate_size": 512,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "attention_bias": True, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2880, "intermediate_size": 2880, "max_position_embeddings": 131072,
        "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-5,
        "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
        "vocab_size": 201088, "rope_theta": 150000,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
            "original_max_position_embeddings": 4096, "truncate": False,
        },
    },
    "glm-4.7-flash": {
        "model_type": "glm4_moe_lite", "attention_bias": False, "first_k_dense_replace": 1,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10240, "kv_lora_rank": 512,
        "max_position_embeddings": 202752, "moe_intermediate_size": 1536, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 20, "num_experts_per_tok": 4, "num_hidden_layers": 47,
        "num_key_value_heads": 20, "q_lora_rank": 768, "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 1000000,
        "routed_scaling_factor": 1.8, "tie_word_embeddings": False, "topk_group": 1,
        "v_head_dim": 256, "vocab_size": 154880,
    },
}  # fmt: skip

NAMES = tuple(_PUBLISHED)


def published(name: str) -> TransformerConfig:
    """Returns the configuration of one of `NAMES`."""
    config = _PUBLISHED[name]
    return FAMILIES[config["model_type"]].read_config(config)
