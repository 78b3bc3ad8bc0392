"""Hunyuan 1 (dense): Llama with norms of queries and keys behind the rope."""

from __future__ import annotations

import dataclasses
import functools

from specjax.models.config import TransformerConfig
from specjax.models.families.family import Config, Family
from specjax.models.families.fields import number, refuse
from specjax.models.families.llama import llama_tensors, read_llama, write_llama
from specjax.models.families.positions import read_rope

_NAMES = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}


def _read(config: Config) -> TransformerConfig:
    refuse(config, use_qk_norm=True, use_cla=False, use_rotary_pos_emb=True, norm_type="rms")
    refuse(config, position_embedding_xdrope=False)
    rope = read_rope(config)
    params = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = params.get("rope_type", params.get("type"))
    if kind == "dynamic" and params.get("alpha"):
        # The base is stretched for all lengths (NTK-aware scaling), and the file has the context.
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        alpha = number(params, "alpha", most=1e12)
        rope = dataclasses.replace(rope, theta=rope.theta * alpha ** (size / max(size - 2, 1)))
    return read_llama(
        config,
        rope=rope,
        qk_norm="head",
        qk_norm_last=True,
        norm_eps=number(config, "rms_norm_eps", 1e-5, least=0.0, most=1.0),
        mlp_bias=False,
    )


def _write(c: TransformerConfig) -> Config:
    return write_llama(c, attention_bias=c.qkv_bias)


HUNYUAN = Family(
    "HunYuanDenseV1ForCausalLM",
    _read,
    _write,
    functools.partial(llama_tensors, names=_NAMES),
)
