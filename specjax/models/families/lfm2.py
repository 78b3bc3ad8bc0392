"""LFM2 (arXiv 2511.23404), dense or with experts: gated short convolutions, and some attention."""

from __future__ import annotations

from specjax._internal.fields import LIST, count, list_of, one_of
from specjax.models.config import MOST, TransformerConfig
from specjax.models.families.experts import ExpertNames, plain_before, sparse_tensors
from specjax.models.families.family import Config, Family, Tensor
from specjax.models.families.fields import check_sizes, flag, given, number
from specjax.models.families.fused import convolution, divided, renamed
from specjax.models.families.llama import dense, llama_tensors, read_llama, write_llama
from specjax.models.families.positions import read_rope
from specjax.models.mixers import ShortConv
from specjax.models.router import Router

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


def _read_layers(config: Config, **changes: object) -> TransformerConfig:
    """Reads the fields that both kinds of LFM2 have; `changes` are those of the other fields."""
    tied = "tie_embedding" if "tie_embedding" in config else "tie_word_embeddings"
    return read_llama(
        config,
        rope=read_rope(config, theta=1e6),
        mixers=read_mixers(config),
        qk_norm="head",
        norm_eps=number(config, "norm_eps", 1e-5, least=0.0, most=1.0),
        tied_embeddings=flag(config, tied, True),
        activation="silu",
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        **changes,
    )


def _read(config: Config) -> TransformerConfig:
    return _read_layers({**config, "intermediate_size": _mlp_size(config)})


def _read_moe(config: Config) -> TransformerConfig:
    check_sizes(config, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    first = count(0, MOST["num_layers"]).read(config, "num_dense_layers", 2)
    sparse = tuple(i >= first for i in range(config["num_hidden_layers"]))
    return _read_layers(
        config,
        num_experts=config["num_experts"],
        experts_per_token=config["num_experts_per_tok"],
        expert_size=config["moe_intermediate_size"],
        normalise_experts=flag(config, "norm_topk_prob", True),
        router=Router(
            "sigmoid",
            corrected=flag(config, "use_expert_bias", True),
            scale=number(config, "routed_scaling_factor", 1.0, most=1e6),
        ),
        sparse=() if all(sparse) else sparse,
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


def _write_moe(c: TransformerConfig) -> Config:
    config = _write(c) | {
        "num_experts": c.num_experts,
        "num_experts_per_tok": c.experts_per_token,
        "moe_intermediate_size": c.expert_size,
        "norm_topk_prob": c.normalise_experts,
        "use_expert_bias": c.router.corrected,
        "routed_scaling_factor": c.router.scale,
        "num_dense_layers": plain_before(c),
    }
    del config["block_auto_adjust_ff_dim"]
    return config


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


def _moe_tensors(c: TransformerConfig) -> list[Tensor]:
    names = ExpertNames("feed_forward", ("w1", "w3", "w2"), correction="expert_bias")
    return renamed(sparse_tensors(c, names, conv_tensors), _NAMES)


LFM2 = Family("Lfm2ForCausalLM", _read, _write, _tensors)
LFM2_MOE = Family("Lfm2MoeForCausalLM", _read_moe, _write_moe, _moe_tensors)
