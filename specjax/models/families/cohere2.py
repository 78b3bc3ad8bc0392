"""Command A and R7B (arXiv 2504.00698): parallel branches, and no rope without a window."""

from __future__ import annotations

from specjax.models.config import TransformerConfig
from specjax.models.families.family import Config, Family
from specjax.models.families.fields import (
    check_sizes,
    flag,
    given,
    number,
    read_windows,
    refuse,
    write_windows,
)
from specjax.models.families.llama import llama_tensors, read_llama, write_llama
from specjax.models.families.positions import read_context, read_rope


def _read(config: Config) -> TransformerConfig:
    refuse(
        config,
        use_qk_norm=False,
        use_parallel_block=True,
        use_gated_activation=True,
        position_embedding_type="rope_gptj",
        rotary_pct=1.0,
    )
    layers = range(config["num_hidden_layers"])
    check_sizes(config, optional=("sliding_window_pattern",))
    period = given(config, "sliding_window_pattern", 4)
    types = ["sliding_attention" if (i + 1) % period else "full_attention" for i in layers]
    windows = read_windows({"sliding_window": 4096, **config}, types)
    rope = read_rope(config)
    return read_llama(
        {**config, "head_dim": None},  # heads make up the hidden size
        norm="centred",
        norm_order="shared",
        norm_eps=number(config, "layer_norm_eps", 1e-5, least=0.0, most=1.0),
        rope=rope,
        ropes=tuple(rope if window else None for window in windows or (None,) * len(layers)),
        max_positions=read_context(config, rope, 8192),
        interleaved=True,
        windows=windows,
        logit_scale=number(config, "logit_scale", 0.0625, least=1e-9, most=1e9),
        tied_embeddings=flag(config, "tie_word_embeddings", True),
        mlp_bias=False,
    )


def _write(c: TransformerConfig) -> Config:
    config = write_llama(
        c,
        layer_norm_eps=c.norm_eps,
        attention_bias=c.qkv_bias,
        logit_scale=c.logit_scale,
        **write_windows(c.windows or (None,) * c.num_layers),  # by default layers slide
    )
    return {name: value for name, value in config.items() if name != "rms_norm_eps"}


COHERE2 = Family("Cohere2ForCausalLM", _read, _write, llama_tensors)
