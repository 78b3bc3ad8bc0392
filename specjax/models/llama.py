"""Llama 2, 3, 3.1 to 3.3, and what shares their layout (TinyLlama, Vicuna, SmolLM2)."""

from __future__ import annotations

from typing import Any

from specjax.models.family import Family, Tensor
from specjax.models.rope import Rope
from specjax.models.transformer import TransformerConfig


def read_rope(config: dict[str, Any]) -> Rope:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before)."""
    found = config.get("rope_parameters") or {
        "rope_theta": config.get("rope_theta", 10000.0),
        **(config.get("rope_scaling") or {}),
    }
    theta = found.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = found.get("rope_type", found.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, found["factor"])
    if kind == "llama3":
        return Rope(
            theta,
            kind,
            found["factor"],
            found["low_freq_factor"],
            found["high_freq_factor"],
            found["original_max_position_embeddings"],
        )
    raise ValueError(f"rope type {kind!r} is not supported; specjax reads default, linear and llama3")


def check_size(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a whole number of at least 1."""
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")


def read_config(config: dict[str, Any]) -> TransformerConfig:
    """A Hugging Face configuration -> ours.  Raises ValueError for a switch that would change the numbers."""
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act={config['hidden_act']!r} is not supported for llama; specjax has silu")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor={config['partial_rotary_factor']} is not supported for llama")
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        check_size(name, config[name])
    heads = config["num_attention_heads"]
    for name in ("num_key_value_heads", "head_dim", "max_position_embeddings"):
        if config.get(name) is not None:
            check_size(name, config[name])
    return TransformerConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        mlp_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        max_positions=config.get("max_position_embeddings", 2048),
        rope=read_rope(config),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tied_embeddings=config.get("tie_word_embeddings", False),
        attention_bias=config.get("attention_bias", False),
        mlp_bias=config.get("mlp_bias", False),
        init_scale=config.get("initializer_range", 0.02),
    )


def write_config(c: TransformerConfig) -> dict[str, Any]:
    """Ours -> a configuration that transformers 4 and 5 read."""
    scaling = None
    if c.rope.kind == "linear":
        scaling = {"rope_type": "linear", "factor": c.rope.factor}
    if c.rope.kind == "llama3":
        scaling = {
            "rope_type": "llama3",
            "factor": c.rope.factor,
            "low_freq_factor": c.rope.low_freq_factor,
            "high_freq_factor": c.rope.high_freq_factor,
            "original_max_position_embeddings": c.rope.original_max_positions,
        }
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.mlp_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.max_positions,
        "rope_theta": c.rope.theta,
        "rope_scaling": scaling,
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied_embeddings,
        "attention_bias": c.attention_bias,
        "mlp_bias": c.mlp_bias,
        "initializer_range": c.init_scale,
    }


def tensors(c: TransformerConfig) -> list[Tensor]:
    """Every tensor that the file must hold."""
    found = [Tensor("model.embed_tokens.weight", ("embedding",)), Tensor("model.norm.weight", ("norm", "weight"))]
    if not c.tied_embeddings:
        found.append(Tensor("lm_head.weight", ("head", "kernel"), transpose=True))
    for i in range(c.num_layers):
        theirs, ours = f"model.layers.{i}", f"layer_{i}"
        found += [
            Tensor(f"{theirs}.input_layernorm.weight", (ours, "attention_norm", "weight")),
            Tensor(f"{theirs}.post_attention_layernorm.weight", (ours, "mlp_norm", "weight")),
        ]
        for block, name, part, bias in (
            *(("self_attn", f"{p}_proj", ("attention", p), c.attention_bias) for p in "qkvo"),
            *(("mlp", f"{p}_proj", ("mlp", p), c.mlp_bias) for p in ("gate", "up", "down")),
        ):
            found.append(Tensor(f"{theirs}.{block}.{name}.weight", (ours, *part, "kernel"), transpose=True))
            if bias:
                found.append(Tensor(f"{theirs}.{block}.{name}.bias", (ours, *part, "bias")))
    return found


LLAMA = Family(
    architecture="LlamaForCausalLM",
    read_config=read_config,
    write_config=write_config,
    tensors=tensors,
    # Old files hold the rotary frequencies, and tied ones sometimes a second copy of the embedding.
    ignored=(".rotary_emb.inv_freq",),
)
