"""LFM2 (arXiv 2511.23404): gated short convolutions, and some layers with attention."""

from __future__ import annotations

from specjax._internal.fields import LIST, list_of, one_of
from specjax.models.config import TransformerConfig
from specjax.models.families.family import Config, Family, Tensor
from specjax.models.families.fields import check_sizes, flag, given, number
from specjax.models.families.fused import convolution, divided, renamed
from specjax.models.families.llama import dense, llama_tensors, read_llama, write_llama
from specjax.models.families.positions import read_rope
from specjax.models.mixers import ShortConv

_NAMES = {
    "model.norm.": "model.embedding_norm.",
    ".input_layernorm.": ".operator_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.down_proj.": ".feed_forward.w2.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".self_attn.o_proj.": ".self_attn.out_proj.",
    ".self_attn.q_norm.": ".self_attn.q_layernorm.",
    ".self_attn.k_norm.": ".self_attn.k_layernorm.",
}
"""Parts of Llama's names, and those of LFM2."""


def _kinds(config: Config) -> list[str]:
    """Returns "conv" or "full_attention" for each layer."""
    layers = range(config["num_hidden_layers"])
    if config.get("layer_types") is None and config.get("full_attn_idxs") is not None:
        full = LIST.read(config, "full_attn_idxs")
        return ["full_attention" if i in full else "conv" for i in layers]
    return config.get("layer_types") or ["full_attention" for _ in layers]


def _mlp_size(config: Config) -> int:
    """Returns the size of the MLP, which files state before it is adjusted."""
    name = "block_ff_dim" if config.get("block_ff_dim") is not None else "intermediate_size"
    check_sizes(config, name, optional=("block_multiple_of",))
    size = config[name]
    if not flag(config, "block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if "block_ffn_dim_multiplier" in config and config["block_ffn_dim_multiplier"] is None:
        return size
    size = int(number(config, "block_ffn_dim_multiplier", 1.0, most=1e6) * size)
    multiple = given(config, "block_multiple_of", 256)
    return -(-size // multiple) * multiple


def read_mixers(config: Config) -> tuple[ShortConv | None, ...]:
    """Reads the mixer of each layer."""
    check_sizes(config, "hidden_size", "num_hidden_layers", optional=("conv_L_cache",))
    size = given(config, "conv_L_cache", 3)
    mixer = ShortConv(config["hidden_size"], size, flag(config, "conv_bias", False))
    kinds = {"conv": mixer, "full_attention": None}
    found = _kinds(config)
    list_of(one_of(kinds)).of("layer_types", found)
    return tuple(kinds[kind] for kind in found)


def _read(config: Config) -> TransformerConfig:
    tied = "tie_embedding" if "tie_embedding" in config else "tie_word_embeddings"
    return read_llama(
        {**config, "intermediate_size": _mlp_size(config)},
        rope=read_rope(config, theta=1e6),
        mixers=read_mixers(config),
        qk_norm="head",
        norm_eps=number(config, "norm_eps", 1e-5, least=0.0, most=1.0),
        tied_embeddings=flag(config, tied, True),
        activation="silu",
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
    )


def _write(c: TransformerConfig) -> Config:
    config = write_llama(
        c,
        norm_eps=c.norm_eps,
        block_auto_adjust_ff_dim=False,
        layer_types=[
            "full_attention" if c.mixer_of(i) is None else "conv" for i in range(c.num_layers)
        ],
    )
    mixer = next((m for m in c.mixers if isinstance(m, ShortConv)), None)
    if mixer is not None:
        config |= {"conv_L_cache": mixer.conv_size, "conv_bias": mixer.bias}
    return {k: v for k, v in config.items() if k not in ("rms_norm_eps", "hidden_act")}


def conv_tensors(c: TransformerConfig, layer: int) -> list[Tensor]:
    """Returns the tensors of a gated short convolution."""
    m, theirs, ours = c.mixer_of(layer), f"model.layers.{layer}.conv", (f"layer_{layer}", "mixer")
    assert isinstance(m, ShortConv)
    rows = divided(
        f"{theirs}.in_proj", ours, dict.fromkeys("bcx", m.channels), c.hidden_size, m.bias
    )
    rows += convolution(f"{theirs}.conv", ours, {"x": m.channels}, m.conv_size, m.bias)
    return rows + dense(f"{theirs}.out_proj", (*ours, "o"), m.bias)


def _tensors(c: TransformerConfig) -> list[Tensor]:
    return renamed(llama_tensors(c, mixers=conv_tensors), _NAMES)


LFM2 = Family("Lfm2ForCausalLM", _read, _write, _tensors)
