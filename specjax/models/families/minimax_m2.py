"""MiniMax-M2: norms over all heads of queries and keys, and a corrected sigmoid router."""

from __future__ import annotations

import functools

from specjax.models.config import TransformerConfig
from specjax.models.families.experts import ExpertNames, sparse_tensors
from specjax.models.families.family import Config, Family
from specjax.models.families.fields import check_sizes, refuse
from specjax.models.families.llama import read_llama, write_llama
from specjax.models.families.positions import read_rope
from specjax.models.router import Router

_ONLY = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
    "attention_bias": False,
}
"""Fields of the publisher's files that would change the numbers, and their only value."""


def _read(config: Config) -> TransformerConfig:
    refuse(config, **_ONLY, attn_type_list=[1] * config["num_hidden_layers"])
    check_sizes(config, "num_local_experts", "num_experts_per_tok", optional=("rotary_dim",))
    size = config.get("head_dim") or 128
    turned = {} if config.get("rotary_dim") is None else {
        "partial_rotary_factor": config["rotary_dim"] / size
    }  # fmt: skip
    rope = read_rope({**turned, **config}, theta=5e6)
    return read_llama(
        config,
        rope=rope,
        head_dim=size,
        qk_norm="whole",
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        num_experts=config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        expert_size=config["intermediate_size"],
        router=Router("sigmoid", corrected=True),
    )


def _write(c: TransformerConfig) -> Config:
    assert c.rope is not None
    return write_llama(
        c,
        num_local_experts=c.num_experts,
        num_experts_per_tok=c.experts_per_token,
        rotary_dim=int(c.head_dim * c.rope.fraction),
        **_ONLY,
    )


MINIMAX_M2 = Family(
    "MiniMaxM2ForCausalLM",
    _read,
    _write,
    functools.partial(
        sparse_tensors,
        names=ExpertNames("block_sparse_moe", ("w1", "w3", "w2"), "e_score_correction_bias"),
    ),
)
