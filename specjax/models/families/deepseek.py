"""DeepSeek V2 (arXiv 2405.04434), V3 and R1 (arXiv 2412.19437), and Kimi K2 (arXiv 2507.20534)."""

from __future__ import annotations

import dataclasses

from specjax._internal.fields import one_of
from specjax.models.config import TransformerConfig
from specjax.models.families.family import Config, Family
from specjax.models.families.fields import refuse
from specjax.models.families.latent import (
    DRAFTING,
    latent_tensors,
    read_experts,
    read_latent,
    read_latent_rope,
    sparse_after,
    write_latent,
)

_GREEDY, _GROUPED = "greedy", "group_limited_greedy"
_METHODS = one_of((_GREEDY, _GROUPED))
_SIZES = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}  # fmt: skip
_V3 = {
    **_SIZES, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "n_shared_experts": 1, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3, "max_position_embeddings": 4096,
}  # fmt: skip
_V2 = {
    **_SIZES, "n_routed_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2,
    "norm_topk_prob": False,
}  # fmt: skip
"""Values of fields that a file leaves out."""


def _read_v3(config: Config) -> TransformerConfig:
    config = {**_V3, **config}
    refuse(config, scoring_func="sigmoid", topk_method="noaux_tc")
    experts = read_experts(config, "sigmoid", sparse_after(config))
    return read_latent(config, read_latent_rope(config), **experts)


def _read_k2(config: Config) -> TransformerConfig:
    # A copy that is saved again is one that transformers reads, which has no kimi_k2.
    return dataclasses.replace(_read_v3(config), family="deepseek_v3")


def _read_v2(config: Config) -> TransformerConfig:
    # Its ropes always turn neighbouring dimensions.
    config = {**_V2, **config, "rope_interleave": True}
    refuse(config, scoring_func="softmax", norm_topk_prob=False)
    if _METHODS.read(config, "topk_method", _GREEDY) == _GREEDY:
        config["n_group"] = None  # it chooses among all experts, whatever their groups
    experts = read_experts(config, "softmax", sparse_after(config), group_best=1)
    return read_latent(config, read_latent_rope(config), **experts)


def _write_v2(c: TransformerConfig) -> Config:
    config = write_latent(c, topk_method=_GROUPED if c.router.groups > 1 else _GREEDY)
    del config["rope_interleave"]
    return config


DEEPSEEK_V2 = Family("DeepseekV2ForCausalLM", _read_v2, _write_v2, latent_tensors)
DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM", _read_v3, write_latent, latent_tensors, skipped=DRAFTING
)
KIMI_K2 = dataclasses.replace(DEEPSEEK_V3, read_config=_read_k2)
