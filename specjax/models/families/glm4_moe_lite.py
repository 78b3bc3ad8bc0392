"""GLM-4.7-Flash: DeepSeek's latent attention and router in a small model (arXiv 2508.06471)."""

from __future__ import annotations

from specjax._internal.fields import list_of, one_of
from specjax.models.config import TransformerConfig
from specjax.models.families.family import Config, Family
from specjax.models.families.fields import number, refuse
from specjax.models.families.latent import (
    DRAFTING,
    latent_tensors,
    read_experts,
    read_latent,
    read_latent_rope,
    sparse_after,
    write_latent,
)

_DEFAULTS = {
    "kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "v_head_dim": 256, "n_routed_experts": 64, "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536, "n_shared_experts": 1, "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1, "max_position_embeddings": 202752,
}  # fmt: skip
_KINDS = one_of(("dense", "sparse"))


def _read(config: Config) -> TransformerConfig:
    config = {**_DEFAULTS, **config}
    refuse(config, scoring_func="sigmoid", topk_method="noaux_tc")
    kinds, sparse = config.get("mlp_layer_types"), sparse_after(config)
    if kinds is not None:
        layers = config["num_hidden_layers"]
        list_of(_KINDS, "entries, one for each of num_hidden_layers", layers).of(
            "mlp_layer_types", kinds
        )
        sparse = tuple(kind == "sparse" for kind in kinds)
    eps = number(config, "rms_norm_eps", 1e-5, least=0.0, most=1.0)
    experts = read_experts(config, "sigmoid", sparse)
    return read_latent(config, read_latent_rope(config), norm_eps=eps, **experts)


def _write(c: TransformerConfig) -> Config:
    kinds = ["sparse" if c.is_sparse(i) else "dense" for i in range(c.num_layers)]
    return write_latent(c, mlp_layer_types=kinds)


GLM4_MOE_LITE = Family("Glm4MoeLiteForCausalLM", _read, _write, latent_tensors, skipped=DRAFTING)
