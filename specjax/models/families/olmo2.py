"""OLMo 2 (arXiv 2501.00656): norms after each branch, and over all heads of queries and keys."""

from __future__ import annotations

from specjax.models.config import TransformerConfig
from specjax.models.families.family import Config, Family
from specjax.models.families.fields import number
from specjax.models.families.llama import llama_tensors, read_llama, write_llama


def _read(config: Config) -> TransformerConfig:
    eps = number(config, "rms_norm_eps", 1e-5, least=0.0, most=1.0)
    return read_llama(config, norm_order="post", qk_norm="whole", mlp_bias=False, norm_eps=eps)


def _write(c: TransformerConfig) -> Config:
    return write_llama(c, attention_bias=c.qkv_bias)


OLMO2 = Family("Olmo2ForCausalLM", _read, _write, llama_tensors)
