"""Qwen2 and 2.5 (arXiv 2412.15115), Qwen3 (arXiv 2505.09388), and their mixtures of experts.

MiMo 7B (arXiv 2505.07608) has the layers of Qwen2, and an MTP layer.
"""

from __future__ import annotations

import dataclasses
import functools

from specjax.models.config import TransformerConfig
from specjax.models.families.experts import (
    ExpertNames,
    plain_layers,
    sparse_in_turn,
    sparse_tensors,
)
from specjax.models.families.family import Config, Family
from specjax.models.families.fields import check_sizes, flag, given, read_windows, write_windows
from specjax.models.families.llama import llama_tensors, read_llama, write_llama


def _windows(config: Config) -> tuple[int | None, ...]:
    config = {"sliding_window": 4096, **config}  # the default of a missing field
    if not flag(config, "use_sliding_window", False) or config["sliding_window"] is None:
        return read_windows(config, ["full_attention"] * config["num_hidden_layers"])
    first = given(config, "max_window_layers", 28)
    layers = range(config["num_hidden_layers"])
    return read_windows(
        config, ["sliding_attention" if i >= first else "full_attention" for i in layers]
    )


def _write_windows(c: TransformerConfig) -> Config:
    if not c.windows:
        return {"use_sliding_window": False, "sliding_window": None}
    return {"use_sliding_window": True, **write_windows(c.windows)}


def _read_qwen2(config: Config) -> TransformerConfig:
    return read_llama(
        config, qkv_bias=True, out_bias=False, mlp_bias=False, windows=_windows(config)
    )


def _read_mimo(config: Config) -> TransformerConfig:
    # A copy that is saved again is one that transformers reads, which has no mimo.
    return dataclasses.replace(_read_qwen2(config), family="qwen2")


def _write_qwen2(c: TransformerConfig) -> Config:
    return write_llama(c, **_write_windows(c))


def _read_qwen3(config: Config, **changes: object) -> TransformerConfig:
    size = config.get("head_dim") or 128  # the family's default, whatever the hidden size
    changes = {"windows": _windows(config), **changes}
    return read_llama(config, qk_norm="head", head_dim=size, mlp_bias=False, **changes)


def _write_qwen3(c: TransformerConfig) -> Config:
    return write_llama(c, attention_bias=c.qkv_bias, **_write_windows(c))


def _read_qwen3_moe(config: Config) -> TransformerConfig:
    # transformers 5 renamed this field to num_local_experts.
    experts = "num_experts" if "num_experts" in config else "num_local_experts"
    check_sizes(config, experts, "num_experts_per_tok", "moe_intermediate_size")
    # Unlike in the dense models, the window applies to every layer.
    window = config.get("sliding_window") if flag(config, "use_sliding_window", False) else None
    if window is not None:
        check_sizes(config, "sliding_window")
    return _read_qwen3(
        config,
        num_experts=config[experts],
        experts_per_token=config["num_experts_per_tok"],
        expert_size=config["moe_intermediate_size"],
        normalise_experts=flag(config, "norm_topk_prob", False),
        sparse=sparse_in_turn(config),
        windows=() if window is None else (window,) * config["num_hidden_layers"],
    )


def _write_qwen3_moe(c: TransformerConfig) -> Config:
    windows = _write_windows(c)
    windows.pop("layer_types", None)
    return write_llama(
        c,
        attention_bias=c.qkv_bias,
        num_experts=c.num_experts,
        num_experts_per_tok=c.experts_per_token,
        moe_intermediate_size=c.expert_size,
        norm_topk_prob=c.normalise_experts,
        decoder_sparse_step=1,
        mlp_only_layers=plain_layers(c),
        **windows,
    )


def _read_qwen2_moe(config: Config) -> TransformerConfig:
    sizes = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    check_sizes(config, *sizes, "shared_expert_intermediate_size")
    config = {"sliding_window": 4096, **config}  # the default of a missing field
    layers = range(config["num_hidden_layers"])
    slides = flag(config, "use_sliding_window", False) and bool(config["sliding_window"])
    first = given(config, "max_window_layers", 28)
    return read_llama(
        config,
        qkv_bias=flag(config, "qkv_bias", True),
        out_bias=False,
        mlp_bias=False,
        windows=read_windows(
            config if slides else {**config, "layer_types": None},
            [
                "sliding_attention" if slides and i % 2 == 0 and i < first else "full_attention"
                for i in layers
            ],
        ),
        num_experts=config["num_experts"],
        experts_per_token=config["num_experts_per_tok"],
        expert_size=config["moe_intermediate_size"],
        normalise_experts=flag(config, "norm_topk_prob", False),
        shared_size=config["shared_expert_intermediate_size"],
        shared_gate=True,
        sparse=sparse_in_turn(config),
    )


def _write_qwen2_moe(c: TransformerConfig) -> Config:
    return write_llama(
        c,
        qkv_bias=c.qkv_bias,
        num_experts=c.num_experts,
        num_experts_per_tok=c.experts_per_token,
        moe_intermediate_size=c.expert_size,
        shared_expert_intermediate_size=c.shared_size,
        norm_topk_prob=c.normalise_experts,
        decoder_sparse_step=1,
        mlp_only_layers=plain_layers(c),
        **_write_windows(c),
    )


QWEN2 = Family("Qwen2ForCausalLM", _read_qwen2, _write_qwen2, llama_tensors)
MIMO = dataclasses.replace(QWEN2, architecture="MiMoForCausalLM", read_config=_read_mimo)
QWEN2_MOE = Family(
    "Qwen2MoeForCausalLM",
    _read_qwen2_moe,
    _write_qwen2_moe,
    functools.partial(sparse_tensors, names=ExpertNames(shared="shared_expert")),
)
QWEN3 = Family("Qwen3ForCausalLM", _read_qwen3, _write_qwen3, llama_tensors)
QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    _read_qwen3_moe,
    _write_qwen3_moe,
    functools.partial(sparse_tensors, names=ExpertNames()),
)
