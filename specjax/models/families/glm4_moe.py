"""GLM-4.5 to 4.7 (arXiv 2508.06471): a corrected sigmoid router, and a shared expert."""

from __future__ import annotations

import functools

from specjax._internal.fields import count
from specjax.models.config import MOST, TransformerConfig
from specjax.models.families.experts import ExpertNames, plain_before, sparse_tensors
from specjax.models.families.family import Config, Family
from specjax.models.families.fields import check_sizes, flag, given, number
from specjax.models.families.llama import read_llama, write_llama
from specjax.models.families.positions import read_rope
from specjax.models.router import Router


def _read(config: Config) -> TransformerConfig:
    # transformers 5 reads this name too.
    experts = "n_routed_experts" if "n_routed_experts" in config else "num_local_experts"
    check_sizes(config, experts, "num_experts_per_tok", "moe_intermediate_size")
    check_sizes(config, optional=("n_group", "topk_group"))
    layers = range(config["num_hidden_layers"])
    first = count(0).read(config, "first_k_dense_replace", 1)
    shared = count(0, MOST["num_experts"]).read(config, "n_shared_experts", 1)
    groups = given(config, "n_group", 1)
    sparse = tuple(i >= first for i in layers)
    return read_llama(
        config,
        rope=read_rope(config, fraction=0.5),
        norm_eps=number(config, "rms_norm_eps", 1e-5, least=0.0, most=1.0),
        qk_norm="head" if flag(config, "use_qk_norm", False) else None,
        out_bias=False,
        mlp_bias=False,
        num_experts=config[experts],
        experts_per_token=config["num_experts_per_tok"],
        expert_size=config["moe_intermediate_size"],
        normalise_experts=flag(config, "norm_topk_prob", True),
        router=Router(
            "sigmoid",
            corrected=True,
            groups=groups,
            kept_groups=given(config, "topk_group", 1) if groups > 1 else 1,
            scale=number(config, "routed_scaling_factor", 1.0, most=1e6),
        ),
        shared_size=shared * config["moe_intermediate_size"],
        sparse=() if all(sparse) else sparse,
    )


def _write(c: TransformerConfig) -> Config:
    assert c.rope is not None
    return write_llama(
        c,
        partial_rotary_factor=c.rope.fraction,
        attention_bias=c.qkv_bias,
        use_qk_norm=c.qk_norm is not None,
        n_routed_experts=c.num_experts,
        num_experts_per_tok=c.experts_per_token,
        moe_intermediate_size=c.expert_size,
        n_shared_experts=c.shared_size // c.expert_size,
        norm_topk_prob=c.normalise_experts,
        n_group=c.router.groups,
        topk_group=c.router.kept_groups,
        routed_scaling_factor=c.router.scale,
        first_k_dense_replace=plain_before(c),
        num_nextn_predict_layers=0,  # the layer that drafts is not read
    )


GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    _read,
    _write,
    functools.partial(sparse_tensors, names=ExpertNames()),
    skipped=("model.layers.{num_layers}.",),  # the layer that drafts
)
