"""Small random targets with recurrent layers, latent attention and experts, in memory."""

from __future__ import annotations

import functools
from typing import Any

import jax

from specjax import LanguageModel, LinenModel, Transformer
from specjax.models import FAMILIES

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
    "linear_value_head_dim": 5, "full_attention_interval": 2, "head_dim": 16,
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**_DELTA, "intermediate_size": 56},
    "qwen3_5_moe_text": {
        **_DELTA, **_EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 10,
    },
    "gpt_oss": {
        "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24,
        "sliding_window": 9, "head_dim": 12, "rope_parameters": {"rope_type": "default"},
    },
    "kimi_k2": {
        **_EXPERTS, "kv_lora_rank": 10, "q_lora_rank": 9, "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4, "v_head_dim": 7, "n_routed_experts": 6, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.7, "intermediate_size": 56,
    },
}  # fmt: skip
"""Family -> fields beside the sizes."""


@functools.cache
def target(family: str, hidden: int, vocab: int, layers: int) -> LanguageModel:
    """A target whose greedy text varies; its small vectors are random too."""
    config = {
        "model_type": family, "vocab_size": vocab, "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "tie_word_embeddings": False, "rms_norm_eps": 0.05,
        "initializer_range": 0.4, **CONFIGS[family],
    }  # fmt: skip
    model = LinenModel(Transformer(FAMILIES[family].read_config(config)))
    params = model.init(jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(params))))

    def drawn(x: jax.Array) -> jax.Array:
        spread = 0.3 if x.ndim == 1 else 0.0
        return x + spread * jax.random.normal(next(keys), x.shape)

    return LanguageModel(model, jax.tree.map(drawn, params), name=family)
