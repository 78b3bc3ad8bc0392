"""OPT (Zhang et al. 2022, arXiv 2205.01068)."""

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
from specjax.models.families.llama import dense

_PADDING = 2  # the table of positions starts with two unused rows


def _read(config: Config) -> TransformerConfig:
    refuse(config, enable_bias=True, layer_norm_elementwise_affine=True)
    check_sizes(
        config, "vocab_size", "hidden_size", "ffn_dim", "num_hidden_layers", "num_attention_heads",
        "max_position_embeddings", optional=("word_embed_proj_dim",),
    )  # fmt: skip
    before = flag(config, "do_layer_norm_before", True)
    size = config.get("word_embed_proj_dim") or config["hidden_size"]
    return TransformerConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        mlp_size=config["ffn_dim"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_attention_heads"],
        head_dim=config["hidden_size"] // config["num_attention_heads"],
        max_positions=config["max_position_embeddings"],
        rope=None,
        position_offset=_PADDING,
        embedding_size=None if size == config["hidden_size"] else size,
        tied_embeddings=flag(config, "tie_word_embeddings", True),
        norm="layer",
        norm_order="pre" if before else "after",
        final_norm=before and not flag(config, "_remove_final_layer_norm", False),
        qkv_bias=True,
        out_bias=True,
        activation=activation(config.get("activation_function", "relu")),
        gated=False,
        mlp_bias=True,
        init_scale=number(config, "init_std", 0.02, least=0.0),
        family="opt",
    )


def _write(c: TransformerConfig) -> Config:
    return {
        "model_type": "opt",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "ffn_dim": c.mlp_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "max_position_embeddings": c.max_positions,
        "word_embed_proj_dim": c.embedding_size or c.hidden_size,
        "tie_word_embeddings": c.tied_embeddings,
        "do_layer_norm_before": c.norm_order == "pre",
        "_remove_final_layer_norm": c.norm_order == "pre" and not c.final_norm,
        "activation_function": activation_name(c.activation),
        "init_std": c.init_scale,
    }


def _tensors(c: TransformerConfig) -> list[Tensor]:
    root = "model.decoder"
    rows = [
        Tensor(f"{root}.embed_tokens.weight", ("embedding",)),
        Tensor(f"{root}.embed_positions.weight", ("positions",)),
    ]
    if not c.tied_embeddings:
        rows += dense("lm_head", ("head",), False)

    def norm(name: str, path: tuple[str, ...]) -> list[Tensor]:
        return [Tensor(f"{root}.{name}.{kind}", (*path, kind)) for kind in ("weight", "bias")]

    if c.final_norm:
        rows += norm("final_layer_norm", ("norm",))
    if c.embedding_size is not None:
        rows += dense(f"{root}.project_in", ("project_in",), False)
        rows += dense(f"{root}.project_out", ("project_out",), False)
    suffix = "norm" if c.norm_order == "pre" else "post_norm"
    for i in range(c.num_layers):
        theirs, ours = f"layers.{i}", f"layer_{i}"
        rows += norm(f"{theirs}.self_attn_layer_norm", (ours, f"attention_{suffix}"))
        rows += norm(f"{theirs}.final_layer_norm", (ours, f"mlp_{suffix}"))
        for part, name in zip("qkvo", ("q_proj", "k_proj", "v_proj", "out_proj"), strict=True):
            rows += dense(f"{root}.{theirs}.self_attn.{name}", (ours, "attention", part), True)
        rows += dense(f"{root}.{theirs}.fc1", (ours, "mlp", "up"), True)
        rows += dense(f"{root}.{theirs}.fc2", (ours, "mlp", "down"), True)
    return rows


OPT = Family("OPTForCausalLM", _read, _write, _tensors, prefixes={"model.": ("model.", "")})
