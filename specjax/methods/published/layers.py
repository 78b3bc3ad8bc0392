"""Reads and writes the configuration of a drafter's decoder layers, and names their tensors."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import warnings

from specjax._internal.fields import list_of, one_of
from specjax.files import CONFIG, named
from specjax.methods.published.format import Tensors
from specjax.models import FAMILIES, Config, Tensor, TransformerConfig, check_fields

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

_WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")


def read_layers(
    folder: pathlib.Path,
    config: Config,
    tensors: Tensors,
    prefixes: list[str],
    windows_like: str | None = None,
) -> TransformerConfig:
    """Reads the configuration of a drafter's decoder layers.

    The number of layers, biases and norms of queries and keys are taken from the tensors, and a
    configuration that contradicts them gives a warning.  One tensor of a component is enough: its
    missing tensors are refused by name when the tensors are read.

    Args:
      config: that of the layers.
      tensors: all of the folder.
      prefixes: of the names of each layer's tensors.
      windows_like: the model_type of transformers' class that the package reads the windows with;
        "fields": none, it reads `layer_types` and `sliding_window` by itself; None: the class of
        the configuration's own model_type.

    Raises:
      ValueError: a setting that is not supported and would change the numbers.
    """
    with named(folder / CONFIG):
        name = "model_type of a drafter's layers"
        kind = one_of(_DEFAULTS).of(name, config.get("model_type", "llama"))

    def has(*parts: str) -> bool:
        return any(f"{prefix}{part}" in tensors for prefix in prefixes for part in parts)

    qkv_bias = has(*(f"self_attn.{part}_proj.bias" for part in "qkv"))
    out_bias = has("self_attn.o_proj.bias")
    written = {
        "num_hidden_layers": len(prefixes),
        "attention_bias": qkv_bias,
        "mlp_bias": has(*(f"mlp.{part}_proj.bias" for part in ("gate", "up", "down"))),
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
    with named(folder / CONFIG):
        plain = {name: value for name, value in fields.items() if name not in _WINDOWS}
        check_fields(plain)
        read = FAMILIES[kind].read_config(plain)
        windows = _read_windows(windows_like or kind, plain, config)
    norms = "head" if has("self_attn.q_norm.weight", "self_attn.k_norm.weight") else None
    return dataclasses.replace(
        read, qk_norm=norms, qkv_bias=qkv_bias, out_bias=out_bias, windows=windows
    )


def _read_windows(kind: str, plain: Config, config: Config) -> tuple[int | None, ...]:
    """Returns the window of each layer, as transformers' class of this model_type has it.

    Args:
      kind: the model_type.
      plain: the fields without those of windows.
      config: as it is in the file, where null and a missing field are not the same.
    """
    fields = {name: config[name] for name in _WINDOWS if name in config}
    kinds, window = fields.pop("layer_types", None), fields.get("sliding_window")
    check_fields(fields)
    count = plain["num_hidden_layers"]
    if kinds:
        known = ("full_attention",) if kind == "llama" else ("full_attention", "sliding_attention")
        list_of(one_of(known), "entries, one a layer", count).of("layer_types", kinds)
    slides = "sliding_attention" in (kinds or ())
    if kind == "fields":
        fields["use_sliding_window"] = slides and window is not None
    elif slides and window is not None and "use_sliding_window" not in fields:
        warnings.warn(
            "config.json has layers with sliding_attention and no use_sliding_window, without "
            "which transformers reads no window: none is read; if the drafter was trained with "
            "windows, add use_sliding_window=true",
            stacklevel=7,
        )
    if kind == "llama" or not fields.get("use_sliding_window"):
        return ()
    like = {**plain, "model_type": "qwen3", **fields, "layer_types": kinds}
    return FAMILIES["qwen3"].read_config(like).windows


def window_lines(layers: TransformerConfig, anchored: bool = False) -> tuple[str, ...]:
    """Returns a line of a description that names the layers with windows, or none.

    Windows that are `anchored` stay with the block (`BlockDraftConfig.anchored_windows`).
    """
    lines = []
    for size in sorted({window for window in layers.windows if window is not None}):
        which = [str(i + 1) for i, window in enumerate(layers.windows) if window == size]
        end = "before its block" if anchored else "before and including its own"
        lines.append(
            f"layer{'s' * (len(which) > 1)} {', '.join(which)} of {layers.num_layers}: a window of "
            f"the {size} tokens {end}"
        )
    return tuple(lines)


def write_layers(layers: TransformerConfig, vocab_size: int) -> Config:
    """Returns the configuration of a drafter's decoder layers, which `read_layers` reads.

    Other libraries build the embedding by `vocab_size`, the number of its rows.
    """
    return FAMILIES[_kind(layers)].write_config(_plain(layers, vocab_size))


def unwritable(layers: TransformerConfig) -> list[str]:
    """Names the settings that no configuration of `read_layers` has."""
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
    """Returns the model_type whose layers these are."""
    if layers.qk_norm is not None:
        return "qwen3"
    return "qwen2" if layers.qkv_bias and not layers.out_bias else "llama"


def _plain(layers: TransformerConfig, vocab_size: int) -> TransformerConfig:
    """Returns the layers by their model_type; a drafter's head is never its embedding."""
    return dataclasses.replace(
        layers, family=_kind(layers), vocab_size=vocab_size, tied_embeddings=False
    )


def layer_prefixes(tensors: Tensors) -> list[str]:
    """Returns the prefix of each layer's tensors: `midlayer.`, `midlayer.{i}.` or `layers.{i}.`.

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


def reads_pairs(tensors: Tensors) -> bool:
    """Returns whether the first layer reads an embedding and a feature, as in EAGLE-3.

    Its queries, keys and values then read twice the numbers that a norm of the layer has.
    """
    prefix = next(iter(layer_prefixes(tensors)), None)
    if prefix is None:
        return False
    if prefix.startswith("midlayer") or f"{prefix}hidden_norm.weight" in tensors:
        return True
    norms = (f"{prefix}{name}_layernorm.weight" for name in ("input", "post_attention"))
    size = next((tensors[name].shape[-1] for name in norms if name in tensors), None)
    projections = (f"{prefix}self_attn.{part}_proj.weight" for part in "qkv")
    wide = next((tensors[name].shape[-1] for name in projections if name in tensors), None)
    return size is not None and wide == 2 * size


def layer_rows(config: TransformerConfig, prefix: str, path: tuple[str, ...]) -> list[Tensor]:
    """Returns the rows of a layer's attention and MLP, and of the norm between them."""
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
    """Returns the rows of a `torch.nn.Linear`."""
    weight = Tensor(f"{name}.weight", (*path, "kernel"), transpose=True)
    return [weight, Tensor(f"{name}.bias", (*path, "bias"))] if bias else [weight]
