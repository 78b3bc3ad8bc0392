"""ERNIE 4.5 (dense): Llama whose rope rotates neighbouring dimensions."""

from __future__ import annotations

from specjax.models.config import TransformerConfig
from specjax.models.families.family import Config, Family
from specjax.models.families.fields import flag, number
from specjax.models.families.llama import llama_tensors, read_llama, write_llama
from specjax.models.families.positions import read_rope


def _read(config: Config) -> TransformerConfig:
    bias = flag(config, "use_bias", False)
    return read_llama(
        {"head_dim": 128, **config},  # the default of a missing field
        rope=read_rope(config, theta=5e5),
        interleaved=True,
        norm_eps=number(config, "rms_norm_eps", 1e-5, least=0.0, most=1.0),
        tied_embeddings=flag(config, "tie_word_embeddings", True),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
    )


def _write(c: TransformerConfig) -> Config:
    return write_llama(c, use_bias=c.qkv_bias)


ERNIE4_5 = Family("Ernie4_5ForCausalLM", _read, _write, llama_tensors)
