"""StarCoder 2 (arXiv 2402.19173): layer norms, biases, and a plain MLP."""

from __future__ import annotations

import functools

from specjax.models.config import TransformerConfig
from specjax.models.families.family import Config, Family
from specjax.models.families.fields import (
    activation,
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
    refuse(config, norm_type="layer_norm", mlp_type="default")
    bias, rope = flag(config, "use_bias", True), read_rope(config)
    sliding = config.get("sliding_window") is not None
    types = ["sliding_attention" if sliding else "full_attention"] * config["num_hidden_layers"]
    return read_llama(
        {"num_key_value_heads": 2, **config},  # the default of a missing field
        norm="layer",
        norm_eps=number(config, "norm_epsilon", 1e-5, least=0.0, most=1.0),
        rope=rope,
        max_positions=read_context(config, rope, 4096),
        windows=read_windows({**config, "layer_types": None}, types),
        activation=activation(given(config, "hidden_act", "gelu_pytorch_tanh")),
        gated=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        tied_embeddings=flag(config, "tie_word_embeddings", True),
        init_scale=number(config, "initializer_range", 0.018042, least=0.0),
    )


def _write(c: TransformerConfig) -> Config:
    config = write_llama(
        c,
        norm_epsilon=c.norm_eps,
        use_bias=c.qkv_bias,
        sliding_window=write_windows(c.windows)["sliding_window"],
    )
    return {name: value for name, value in config.items() if name != "rms_norm_eps"}


STARCODER2 = Family(
    "Starcoder2ForCausalLM",
    _read,
    _write,
    functools.partial(llama_tensors, names={"up": "c_fc", "down": "c_proj"}),
)
