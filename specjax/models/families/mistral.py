"""Mistral (Jiang et al. 2023, arXiv 2310.06825) and Mixtral (2024, arXiv 2401.04088)."""

from __future__ import annotations

import functools

from specjax.models.config import TransformerConfig
from specjax.models.families.family import Config, Family
from specjax.models.families.fields import check_sizes, number, read_windows, write_windows
from specjax.models.families.llama import llama_tensors, read_llama, write_llama
from specjax.models.families.positions import read_rope


def _read_mistral(config: Config) -> TransformerConfig:
    # 4096 is the default of a missing field; null means that no layer slides.
    return _read({"sliding_window": 4096, **config})


def _read(config: Config, **changes: object) -> TransformerConfig:
    sliding = config.get("sliding_window") is not None
    types = ["sliding_attention" if sliding else "full_attention"] * config["num_hidden_layers"]
    return read_llama(
        config, windows=read_windows({**config, "layer_types": None}, types), **changes
    )


def _write(c: TransformerConfig, **changes: object) -> Config:
    return write_llama(c, sliding_window=write_windows(c.windows)["sliding_window"], **changes)


def _read_mixtral(config: Config) -> TransformerConfig:
    check_sizes(config, "num_local_experts", "num_experts_per_tok")
    return _read(
        config,
        num_experts=config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        expert_size=config["intermediate_size"],
        norm_eps=number(config, "rms_norm_eps", 1e-5, least=0.0, most=1.0),
        rope=read_rope(config, theta=1e6),
    )


def _write_mixtral(c: TransformerConfig) -> Config:
    return _write(c, num_local_experts=c.num_experts, num_experts_per_tok=c.experts_per_token)


MISTRAL = Family(
    "MistralForCausalLM",
    _read_mistral,
    _write,
    llama_tensors,
    ignored=(".rotary_emb.inv_freq",),
)

MIXTRAL = Family(
    "MixtralForCausalLM",
    _read_mixtral,
    _write_mixtral,
    functools.partial(llama_tensors, experts="block_sparse_moe", expert_parts=("w1", "w3", "w2")),
)
