"""Granite 3 and 4 (dense): Llama with factors of embeddings, branches, scores and logits."""

from __future__ import annotations

from specjax.models.config import TransformerConfig
from specjax.models.families.family import Config, Family
from specjax.models.families.fields import number
from specjax.models.families.llama import llama_tensors, read_llama, write_llama


def read_factors(config: Config) -> dict[str, float]:
    """Reads the four factors, as fields of `TransformerConfig`."""

    def factor(name: str) -> float:
        return number(config, name, 1.0, least=1e-9, most=1e9)

    return {
        "embedding_scale": factor("embedding_multiplier"),
        "branch_scale": factor("residual_multiplier"),
        "query_scale": factor("attention_multiplier"),
        "logit_scale": 1 / factor("logits_scaling"),
    }


def write_factors(c: TransformerConfig) -> Config:
    """Returns the fields that `read_factors` reads."""
    return {
        "embedding_multiplier": c.embedding_scale,
        "residual_multiplier": c.branch_scale,
        "attention_multiplier": c.query_scale,
        "logits_scaling": 1 / c.logit_scale,
    }


def _read(config: Config) -> TransformerConfig:
    return read_llama(config, **read_factors(config))


def _write(c: TransformerConfig) -> Config:
    return write_llama(c, attention_bias=c.qkv_bias, mlp_bias=c.mlp_bias, **write_factors(c))


GRANITE = Family("GraniteForCausalLM", _read, _write, llama_tensors)
