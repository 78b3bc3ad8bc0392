"""SmolLM3: Llama with no rotary positions in some layers (NoPE, Yang et al. 2025, 2501.18795)."""

from __future__ import annotations

from specjax.models.config import TransformerConfig
from specjax.models.families.family import Config, Family
from specjax.models.families.fields import flag, given, read_windows, write_windows
from specjax.models.families.llama import llama_tensors, read_llama, write_llama
from specjax.models.families.positions import read_rope


def _turned(config: Config) -> list[bool]:
    """Returns the layers that have rotary positions."""
    flags = config.get("no_rope_layers")  # in spite of its name, 1 means that a layer has them
    interval = given(config, "no_rope_layer_interval", 4)
    return (
        [bool(x) for x in flags]
        if flags
        else [(i + 1) % interval != 0 for i in range(config["num_hidden_layers"])]
    )


def _read(config: Config) -> TransformerConfig:
    turned, rope = _turned(config), read_rope(config, theta=2e6)
    sliding = flag(config, "use_sliding_window", False) and config.get("sliding_window") is not None
    types = ["sliding_attention" if sliding and not turn else "full_attention" for turn in turned]
    ropes = tuple(rope if turn else None for turn in turned)
    tied = flag(config, "tie_word_embeddings", True)
    return read_llama(
        config, rope=rope, ropes=ropes, windows=read_windows(config, types), tied_embeddings=tied
    )


def _write(c: TransformerConfig) -> Config:
    return write_llama(
        c,
        attention_bias=c.qkv_bias,
        mlp_bias=c.mlp_bias,
        no_rope_layers=[int(c.rope_of(i) is not None) for i in range(c.num_layers)],
        use_sliding_window=bool(c.windows),
        **write_windows(c.windows),
    )


SMOLLM3 = Family("SmolLM3ForCausalLM", _read, _write, llama_tensors)
