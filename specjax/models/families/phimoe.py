"""Phi-3.5-MoE (arXiv 2404.14219): a sparsemixer of experts, layer norms, and a head with a bias."""

from __future__ import annotations

import dataclasses
import functools

from specjax._internal.fields import one_of
from specjax.models.config import TransformerConfig
from specjax.models.families.family import Config, Family
from specjax.models.families.fields import (
    check_sizes,
    flag,
    number,
    read_windows,
    refuse,
    write_windows,
)
from specjax.models.families.llama import llama_tensors, read_llama, write_llama
from specjax.models.families.positions import read_context, read_rope
from specjax.models.rope import Rope
from specjax.models.router import Router

_DEFAULTS = {"num_key_value_heads": 8, "num_local_experts": 16, "num_experts_per_tok": 2}
_SHORT, _LONG = "short_mscale", "long_mscale"


def _rope(config: Config) -> Rope:
    """Reads the rope; a long one states the amplitudes of short and of long texts."""
    rope = read_rope(config, theta=1e6)
    one_of(("default", "longrope")).of("rope_type", rope.kind)
    if rope.kind == "default":
        return rope
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    refuse({**scaling, "model_type": config["model_type"]}, attention_factor=None)
    return dataclasses.replace(rope, amplitude=number(scaling, _SHORT, most=1e3))


def _read(config: Config) -> TransformerConfig:
    config = {**_DEFAULTS, **config}
    check_sizes(config, "num_local_experts", "num_experts_per_tok", "intermediate_size")
    rope, sliding = _rope(config), config.get("sliding_window") is not None
    types = ["sliding_attention" if sliding else "full_attention"] * config["num_hidden_layers"]
    return read_llama(
        config,
        rope=rope,
        max_positions=read_context(config, rope, 131072),
        windows=read_windows({**config, "layer_types": None}, types),
        norm="layer",
        norm_eps=number(config, "rms_norm_eps", 1e-5, least=0.0, most=1.0),
        head_bias=flag(config, "lm_head_bias", False),
        mlp_bias=False,
        num_experts=config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        expert_size=config["intermediate_size"],
        normalise_experts=False,
        router=Router(
            "sparsemixer", jitter=number(config, "router_jitter_noise", 0.01, least=0.0, most=1.0)
        ),
    )


def _write(c: TransformerConfig) -> Config:
    config = write_llama(
        c,
        attention_bias=c.qkv_bias,
        lm_head_bias=c.head_bias,
        sliding_window=write_windows(c.windows)["sliding_window"],
        num_local_experts=c.num_experts,
        num_experts_per_tok=c.experts_per_token,
        router_jitter_noise=c.router.jitter,
    )
    scaling = config.get("rope_scaling")
    if c.rope is not None and scaling:
        amplitude = scaling.pop("attention_factor")
        scaling |= {_SHORT: amplitude, _LONG: amplitude}
        config["original_max_position_embeddings"] = c.rope.original_max_positions
    return config


PHIMOE = Family(
    "PhimoeForCausalLM",
    _read,
    _write,
    functools.partial(llama_tensors, experts="block_sparse_moe", expert_parts=("w1", "w3", "w2")),
)
