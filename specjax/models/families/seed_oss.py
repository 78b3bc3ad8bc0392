"""Seed-OSS: Llama with biases of queries, keys and values, and heads of any size."""

from __future__ import annotations

from specjax.models.config import TransformerConfig
from specjax.models.families.family import Config, Family
from specjax.models.families.fields import flag
from specjax.models.families.llama import llama_tensors, read_llama, write_llama


def _read(config: Config) -> TransformerConfig:
    return read_llama(
        {"head_dim": 128, **config},  # the default of a missing field
        qkv_bias=flag(config, "attention_bias", True),
        out_bias=flag(config, "attention_out_bias", False),
    )


def _write(c: TransformerConfig) -> Config:
    return write_llama(
        c, attention_bias=c.qkv_bias, attention_out_bias=c.out_bias, mlp_bias=c.mlp_bias
    )


SEED_OSS = Family("SeedOssForCausalLM", _read, _write, llama_tensors)
