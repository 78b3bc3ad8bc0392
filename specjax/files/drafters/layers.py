"""The decoder layers of a drafter: their configuration, and the names of their tensors."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import warnings

from specjax.files.drafters.format import Tensors
from specjax.models import FAMILIES, Config, Tensor, TransformerConfig

_DEFAULTS: dict[str, Config] = {
    "llama": {
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "vocab_size": 32000,
    },
    "qwen2": {
        "intermediate_size": 22016,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "vocab_size": 151936,
    },
}
_DEFAULTS["qwen3"] = {**_DEFAULTS["qwen2"], "head_dim": 128}
_COMMON: Config = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}
"""The defaults of transformers' classes.  Some exporters leave out the values that equal them."""


def read_layers(
    folder: pathlib.Path, config: Config, tensors: Tensors, prefixes: list[str]
) -> TransformerConfig:
    """The configuration of a drafter's decoder layers.

    What the tensors show (the number of layers, biases, norms of queries and keys) is taken from
    them, and a configuration that says otherwise gives a warning.

    Args:
      folder: for messages.
      config: that of the layers.
      tensors: all of the folder.
      prefixes: of the names of each layer's tensors.

    Raises:
      ValueError: a setting that is not supported and would change the numbers.
    """
    kind = config.get("model_type", "llama")
    if kind not in _DEFAULTS:
        raise ValueError(
            f"{folder}: model_type {kind!r} of a drafter's layers is not supported; specjax reads "
            f"{', '.join(_DEFAULTS)}"
        )
    attention = f"{prefixes[0]}self_attn."
    has_norms = f"{attention}q_norm.weight" in tensors
    qkv_bias, out_bias = (f"{attention}{part}_proj.bias" in tensors for part in "qo")
    written = {
        "num_hidden_layers": len(prefixes),
        "attention_bias": qkv_bias,
        "mlp_bias": f"{prefixes[0]}mlp.up_proj.bias" in tensors,
    }
    for name, seen in written.items():
        if config.get(name, seen) not in (seen, None):
            warnings.warn(
                f"{folder}: config.json says {name}={config[name]}, and the tensors show {seen}: "
                "the tensors count",
                stacklevel=6,
            )
    given = {name: value for name, value in config.items() if value is not None}
    fields = {**_COMMON, **_DEFAULTS[kind], **given, **written, "model_type": kind}
    try:
        if kind == "llama" and "sliding_attention" in (config.get("layer_types") or ()):
            raise ValueError("layers of model_type llama with sliding_attention are not supported")
        read = FAMILIES[kind].read_config(fields)
    except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None
    except KeyError as error:
        raise ValueError(f"{folder / 'config.json'} lacks {error}") from None
    norms = "head" if has_norms else None
    return dataclasses.replace(read, qk_norm=norms, qkv_bias=qkv_bias, out_bias=out_bias)


def write_layers(layers: TransformerConfig, vocab_size: int) -> Config:
    """The configuration of a drafter's decoder layers, which `read_layers` reads.

    Args:
      layers: of the drafter.
      vocab_size: the rows of the embedding, by which other libraries build it.
    """
    return FAMILIES[_kind(layers)].write_config(_plain(layers, vocab_size))


def unwritable(layers: TransformerConfig) -> list[str]:
    """The settings that no configuration of `read_layers` has, in words."""
    if layers.rope is None or layers.ropes:
        return ["has layers without a rope, or with several"]
    if layers.qk_norm == "whole":
        return ["has norms of whole queries and keys (qk_norm)"]
    plain = _plain(layers, layers.vocab_size)
    try:
        read = FAMILIES[_kind(layers)].read_config(write_layers(layers, layers.vocab_size))
    except ValueError as error:
        return [f"has layers that are not read back ({error})"]
    read = dataclasses.replace(read, qk_norm=plain.qk_norm)
    lost = [name for name, value in vars(plain).items() if vars(read)[name] != value]
    return [f"has layers of {name}={vars(plain)[name]!r}" for name in lost]


def _kind(layers: TransformerConfig) -> str:
    """The model_type whose layers these are."""
    if layers.qk_norm is not None:
        return "qwen3"
    return "qwen2" if layers.qkv_bias and not layers.out_bias else "llama"


def _plain(layers: TransformerConfig, vocab_size: int) -> TransformerConfig:
    """The layers by their model_type; a drafter's head is never its embedding."""
    return dataclasses.replace(
        layers, family=_kind(layers), vocab_size=vocab_size, tied_embeddings=False
    )


def layer_prefixes(tensors: Tensors) -> list[str]:
    """The prefix of the tensor names of each layer: `midlayer.`, `midlayer.{i}.` or `layers.{i}.`.

    Returns [] if there is no layer.
    """
    for stem in ("midlayer", "layers"):
        if any(name.startswith(f"{stem}.self_attn.") for name in tensors):
            return [f"{stem}."]
        found = {
            int(match[1]) for name in tensors if (match := re.match(rf"{stem}\.(\d+)\.", name))
        }
        if found:
            return [f"{stem}.{i}." for i in range(max(found) + 1)]
    return []


def layer_rows(config: TransformerConfig, prefix: str, path: tuple[str, ...]) -> list[Tensor]:
    """The rows of a layer's attention and MLP, and of the norm between them."""
    rows = [
        Tensor(f"{prefix}post_attention_layernorm.weight", (*path, "mlp_norm", "weight")),
    ]
    for part in "qk" if config.qk_norm else "":
        name = f"{prefix}self_attn.{part}_norm.weight"
        rows.append(Tensor(name, (*path, "attention", f"{part}_norm", "weight")))
    for part in "qkvo":
        bias = config.out_bias if part == "o" else config.qkv_bias
        rows += dense_rows(f"{prefix}self_attn.{part}_proj", (*path, "attention", part), bias)
    for part in ("gate", "up", "down"):
        rows += dense_rows(f"{prefix}mlp.{part}_proj", (*path, "mlp", part), config.mlp_bias)
    return rows


def dense_rows(name: str, path: tuple[str, ...], bias: bool = False) -> list[Tensor]:
    """The rows of a `torch.nn.Linear`."""
    weight = Tensor(f"{name}.weight", (*path, "kernel"), transpose=True)
    return [weight, Tensor(f"{name}.bias", (*path, "bias"))] if bias else [weight]
