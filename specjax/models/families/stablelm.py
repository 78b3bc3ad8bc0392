"""StableLM 2 and 3B (arXiv 2402.17834): layer norms, and a rope in a quarter of each head."""

from __future__ import annotations

import functools

from specjax.models.config import TransformerConfig
from specjax.models.families.family import Config, Family
from specjax.models.families.fields import flag, number
from specjax.models.families.llama import llama_tensors, read_llama, write_llama
from specjax.models.families.positions import read_context, read_rope


def _read(config: Config) -> TransformerConfig:
    rope = read_rope(config, fraction=0.25)
    return read_llama(
        {**config, "head_dim": None},  # heads make up the hidden size
        norm="layer",
        norm_eps=number(config, "layer_norm_eps", 1e-5, least=0.0, most=1.0),
        norm_order="shared" if flag(config, "use_parallel_residual", False) else "pre",
        qk_norm="heads" if flag(config, "qk_layernorm", False) else None,
        rope=rope,
        max_positions=read_context(config, rope, 4096),
        qkv_bias=flag(config, "use_qkv_bias", False),
        out_bias=False,
        mlp_bias=False,
    )


def _write(c: TransformerConfig) -> Config:
    assert c.rope is not None
    config = write_llama(
        c,
        layer_norm_eps=c.norm_eps,
        use_parallel_residual=c.norm_order == "shared",
        qk_layernorm=c.qk_norm is not None,
        use_qkv_bias=c.qkv_bias,
        partial_rotary_factor=c.rope.fraction,
    )
    return {name: value for name, value in config.items() if name != "rms_norm_eps"}


STABLELM = Family(
    "StableLmForCausalLM",
    _read,
    _write,
    functools.partial(llama_tensors, names={"q_norm": "q_layernorm", "k_norm": "k_layernorm"}),
)
