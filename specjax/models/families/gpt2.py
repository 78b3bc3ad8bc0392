"""GPT-2 (Radford et al. 2019) and DistilGPT-2."""

from __future__ import annotations

from specjax.models.config import TransformerConfig
from specjax.models.families.family import Config, Family, Tensor
from specjax.models.families.fields import (
    activation,
    activation_name,
    check_sizes,
    flag,
    number,
    refuse,
)


def _read(config: Config) -> TransformerConfig:
    refuse(
        config,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    )
    check_sizes(
        config, "vocab_size", "n_embd", "n_layer", "n_head", "n_positions", optional=("n_inner",)
    )
    return TransformerConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["n_embd"],
        mlp_size=config.get("n_inner") or 4 * config["n_embd"],
        num_layers=config["n_layer"],
        num_heads=config["n_head"],
        num_kv_heads=config["n_head"],
        head_dim=config["n_embd"] // config["n_head"],
        max_positions=config["n_positions"],
        rope=None,
        position_offset=0,
        tied_embeddings=flag(config, "tie_word_embeddings", True),
        norm="layer",
        norm_eps=number(config, "layer_norm_epsilon", 1e-5, least=0.0, most=1.0),
        qkv_bias=True,
        out_bias=True,
        activation=activation(config.get("activation_function", "gelu_new")),
        gated=False,
        mlp_bias=True,
        init_scale=number(config, "initializer_range", 0.02, least=0.0),
        family="gpt2",
    )


def _write(c: TransformerConfig) -> Config:
    return {
        "model_type": "gpt2",
        "vocab_size": c.vocab_size,
        "n_embd": c.hidden_size,
        "n_inner": c.mlp_size,
        "n_layer": c.num_layers,
        "n_head": c.num_heads,
        "n_positions": c.max_positions,
        "tie_word_embeddings": c.tied_embeddings,
        "layer_norm_epsilon": c.norm_eps,
        "activation_function": activation_name(c.activation),
        "initializer_range": c.init_scale,
    }


def _tensors(c: TransformerConfig) -> list[Tensor]:
    rows = [
        Tensor("transformer.wte.weight", ("embedding",)),
        Tensor("transformer.wpe.weight", ("positions",)),
    ]
    if not c.tied_embeddings:
        rows.append(Tensor("lm_head.weight", ("head", "kernel"), transpose=True))

    def both(name: str, path: tuple[str, ...], weight: str = "weight") -> list[Tensor]:
        name = f"transformer.{name}"
        return [Tensor(f"{name}.weight", (*path, weight)), Tensor(f"{name}.bias", (*path, "bias"))]

    rows += both("ln_f", ("norm",))
    for i in range(c.num_layers):
        theirs, ours, size = f"h.{i}", f"layer_{i}", c.hidden_size
        rows += both(f"{theirs}.ln_1", (ours, "attention_norm"))
        rows += both(f"{theirs}.ln_2", (ours, "mlp_norm"))
        rows += both(f"{theirs}.attn.c_proj", (ours, "attention", "o"), "kernel")
        rows += both(f"{theirs}.mlp.c_fc", (ours, "mlp", "up"), "kernel")
        rows += both(f"{theirs}.mlp.c_proj", (ours, "mlp", "down"), "kernel")
        for n, part in enumerate("qkv"):
            at, path = slice(n * size, (n + 1) * size), (ours, "attention", part)
            name = f"transformer.{theirs}.attn.c_attn"
            rows.append(
                Tensor(
                    f"{name}.weight",
                    (*path, "kernel"),
                    shape=(size, 3 * size),
                    index=(slice(None), at),
                )
            )
            rows.append(Tensor(f"{name}.bias", (*path, "bias"), shape=(3 * size,), index=(at,)))
    return rows


GPT2 = Family(
    "GPT2LMHeadModel",
    _read,
    _write,
    _tensors,
    ignored=(".attn.bias", ".attn.masked_bias"),  # causal masks
    prefixes={"transformer.": ("transformer.", "")},
)
