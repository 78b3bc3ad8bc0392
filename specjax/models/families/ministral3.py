"""Ministral 3 (arXiv 2601.08584): Mistral with YaRN, and queries that grow with the position."""

from __future__ import annotations

import dataclasses

from specjax.models.config import TransformerConfig
from specjax.models.families.family import Config, Family
from specjax.models.families.fields import check_fields, given, number, read_windows, write_windows
from specjax.models.families.llama import llama_tensors, read_llama, write_llama
from specjax.models.families.positions import read_context, read_rope

_BETA, _ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"
_DEFAULT = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, _ORIGINAL: 16384, "mscale": 1.0,
    "mscale_all_dim": 1.0, _BETA: 0.1,
}  # fmt: skip
"""The rope of a file that has none."""


def _read(config: Config) -> TransformerConfig:
    params = config.get("rope_parameters") or config.get("rope_scaling") or _DEFAULT
    config = {"head_dim": 128, "num_key_value_heads": 8, **config, "rope_parameters": params}
    rope = read_rope(config)
    growth = number(params, _BETA, 0.0, least=0.0, most=1e3) if params.get(_BETA) else 0.0
    if growth:
        check_fields({_ORIGINAL: params[_ORIGINAL]})
        rope = dataclasses.replace(rope, growth=growth, original_max_positions=params[_ORIGINAL])
    sliding = config.get("sliding_window") is not None
    types = ["sliding_attention" if sliding else "full_attention"] * config["num_hidden_layers"]
    return read_llama(
        config,
        rope=rope,
        max_positions=read_context(config, rope, 262144),
        windows=read_windows({**config, "layer_types": None}, types),
        norm_eps=number(config, "rms_norm_eps", 1e-5, least=0.0, most=1.0),
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
    )


def _write(c: TransformerConfig) -> Config:
    assert c.rope is not None
    config = write_llama(c, sliding_window=write_windows(c.windows)["sliding_window"])
    scaling = given(config, "rope_scaling", {"rope_type": "default"})
    growth = {_BETA: c.rope.growth, _ORIGINAL: c.rope.original_max_positions}
    return {**config, "rope_scaling": {**scaling, **(growth if c.rope.growth else {_BETA: 0.0})}}


MINISTRAL3 = Family("Ministral3ForCausalLM", _read, _write, llama_tensors)
