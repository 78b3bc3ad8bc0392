"""Llama 2, 3, 3.1 to 3.3, and models with the same layout (TinyLlama, Vicuna, SmolLM2).

Most later families are variations of this one: their files call `read_llama`, `write_llama` and
`llama_tensors`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from specjax.models.config import TransformerConfig
from specjax.models.families.family import Config, Family, Tensor
from specjax.models.families.fields import (
    activation,
    activation_name,
    check_sizes,
    flag,
    given,
    number,
    refuse,
)
from specjax.models.families.positions import read_context, read_rope, write_positions

_NORMS = {
    "pre": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "post": {
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    "sandwich": {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    "shared": {"attention_norm": "input_layernorm"},
}


def read_llama(config: Config, **changes: object) -> TransformerConfig:
    """Reads a Hugging Face configuration; `changes` replace fields in which a family differs.

    Raises:
      ValueError: a setting that is not supported and would change the numbers.
      KeyError: a field is missing.
    """
    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    check_sizes(
        config, *sizes, optional=("num_key_value_heads", "head_dim", "max_position_embeddings")
    )
    heads = config["num_attention_heads"]
    bias = flag(config, "attention_bias", False)
    rope: Any = changes["rope"] if "rope" in changes else read_rope(config)
    fields: Config = {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "mlp_size": config["intermediate_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "max_positions": read_context(config, rope),
        "rope": rope,
        "norm_eps": number(config, "rms_norm_eps", 1e-6, least=0.0, most=1.0),
        "tied_embeddings": flag(config, "tie_word_embeddings", False),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": flag(config, "mlp_bias", False),
        "activation": activation(given(config, "hidden_act", "silu")),
        "init_scale": number(config, "initializer_range", 0.02, least=0.0),
        "family": config["model_type"],
    }
    fields |= changes
    if not any(fields.get("mixers", ())):  # no layer has another mixer than attention
        fields["mixers"] = ()
    return TransformerConfig(**fields)


def write_llama(c: TransformerConfig, **changes: object) -> Config:
    """Returns a Hugging Face configuration that transformers 4 and 5 read.

    `changes` replace fields in which a family differs.
    """
    return {
        "model_type": c.family,
        "hidden_act": activation_name(c.activation),
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.mlp_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied_embeddings,
        "initializer_range": c.init_scale,
        **write_positions(c),
        **changes,
    }


def llama_tensors(
    c: TransformerConfig,
    experts: str = "mlp",
    expert_parts: tuple[str, ...] = (),
    mixers: Callable[[TransformerConfig, int], list[Tensor]] | None = None,
    names: Mapping[str, str] = MappingProxyType({}),
) -> list[Tensor]:
    """Returns every tensor that the files must hold.

    Args:
      c: the configuration.
      mixers: returns the tensors of a layer's mixer that is not attention, by the layer's index.
      experts: the name of the block that holds the experts.
      expert_parts: the names of an expert's matrices: gate, if it has one, up and down.
      names: of the modules that are not named as in Llama, by our name.
    """

    def norm(name: str, path: tuple[str, ...]) -> list[Tensor]:
        kinds = ("weight", "bias") if c.norm == "layer" else ("weight",)
        return [Tensor(f"{name}.{kind}", (*path, kind)) for kind in kinds]

    rows = [Tensor("model.embed_tokens.weight", ("embedding",))]
    rows += norm("model.norm", ("norm",))
    if c.head_bias:
        rows.append(Tensor("lm_head.bias", ("head", "bias")))
    if not c.tied_embeddings:
        rows.append(Tensor("lm_head.weight", ("head", "kernel"), transpose=True))
    for i in range(c.num_layers):
        theirs, ours = f"model.layers.{i}", f"layer_{i}"
        branch = c.branch_of(i)
        for name, there in _NORMS[c.norm_order_of(i)].items():
            if branch in ("both", "mlp" if name.startswith("mlp") else "mixer"):
                rows += norm(f"{theirs}.{names.get(name, there)}", (ours, name))
        if mixers is not None and c.mixer_of(i) is not None:
            rows += mixers(c, i)
        if c.attends(i):
            rows += attention_tensors(c, f"{theirs}.self_attn", (ours, "attention"), names)
        if branch == "mixer":
            continue
        parts = ("gate", "up", "down") if c.gated else ("up", "down")
        if not c.is_sparse(i):
            for part in parts:
                there = f"{theirs}.mlp.{names.get(part, f'{part}_proj')}"
                rows += dense(there, (ours, "mlp", part), c.mlp_bias)
            continue
        rows += dense(f"{theirs}.{experts}.gate", (ours, "mlp", "router"), False)
        for expert in range(c.num_experts):
            for part, name in zip(parts, expert_parts, strict=True):
                name = f"{theirs}.{experts}.experts.{expert}.{name}.weight"
                rows.append(Tensor(name, (ours, "mlp", part), transpose=True, at=expert))
    return rows


def attention_tensors(
    c: TransformerConfig,
    theirs: str,
    ours: tuple[str, ...],
    names: Mapping[str, str] = MappingProxyType({}),
) -> list[Tensor]:
    """Returns the tensors of attention; a gate of its output lies in `q_proj`, head by head."""
    rows = []
    weights = c.qk_norm not in (None, "unit")
    for part, heads in (("q_norm", c.num_heads), ("k_norm", c.num_kv_heads)) if weights else ():
        there, path = f"{theirs}.{names.get(part, part)}", (*ours, part, "weight")
        if c.qk_norm == "heads":
            rows += [Tensor(f"{there}.norms.{h}.weight", path, at=h) for h in range(heads)]
        else:
            rows.append(Tensor(f"{there}.weight", path))
    for part in "qkvo":
        bias = c.out_bias if part == "o" else c.qkv_bias
        parts = dense(f"{theirs}.{part}_proj", (*ours, part), bias)
        if part == "q" and c.output_gate:
            heads, size = c.num_heads, c.head_dim
            for row in parts:
                rest = (c.hidden_size,) if row.transpose else ()
                for number, name in enumerate(("q", "gate")):
                    half = dataclasses.replace(
                        row,
                        path=(*ours, name, row.path[-1]),
                        shape=(2 * heads * size, *rest),
                        view=(heads, 2, size, *rest),
                        index=(slice(None), number),
                    )
                    rows.append(half)
        else:
            rows += parts
    return rows


def dense(name: str, path: tuple[str, ...], bias: bool) -> list[Tensor]:
    """Returns the rows of a `torch.nn.Linear`."""
    weight = Tensor(f"{name}.weight", (*path, "kernel"), transpose=True)
    return [weight, Tensor(f"{name}.bias", (*path, "bias"))] if bias else [weight]


def _read(config: Config) -> TransformerConfig:
    refuse(config, partial_rotary_factor=1.0)
    return read_llama(config)


def _write(c: TransformerConfig) -> Config:
    return write_llama(c, attention_bias=c.qkv_bias, mlp_bias=c.mlp_bias)


LLAMA = Family(
    architecture="LlamaForCausalLM",
    read_config=_read,
    write_config=_write,
    tensors=llama_tensors,
    # Old files hold the rotary frequencies as well.
    ignored=(".rotary_emb.inv_freq",),
)
