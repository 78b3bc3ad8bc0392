"""Reads, checks and writes the fields of a configuration that several families share."""

from __future__ import annotations

from typing import Any

from specjax._internal.checks import shown
from specjax._internal.fields import (
    FLAG,
    LAYERS,
    OBJECT,
    TEXT,
    Kind,
    check,
    count,
    list_of,
    one_of,
    real,
)
from specjax.models.config import MOST
from specjax.models.families.family import Config

_ATTENTION = one_of(("full_attention", "sliding_attention"))
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "n_embd": "hidden_size",
    "intermediate_size": "mlp_size",
    "n_inner": "mlp_size",
    "ffn_dim": "mlp_size",
    "num_hidden_layers": "num_layers",
    "n_layer": "num_layers",
    "num_attention_heads": "num_heads",
    "n_head": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_positions",
    "original_max_position_embeddings": "max_positions",
    "n_positions": "max_positions",
    "word_embed_proj_dim": "embedding_size",
    "num_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "expert_size",
    "decoder_sparse_step": "num_layers",
    "no_rope_layer_interval": "num_layers",
    "_sliding_window_pattern": "num_layers",
}
"""Fields that are whole numbers of at least 1, and our size with the same greatest value."""

_NAME = Kind("a text, or null", lambda value: isinstance(value, str))
_PERIOD = count(0, MOST["num_layers"])
_KINDS = {
    **{name: count(1, MOST[ours]) for name, ours in _SIZES.items()},
    **dict.fromkeys(("num_local_experts", "num_experts_per_tok"), count(0, MOST["num_experts"])),
    **dict.fromkeys(("max_window_layers", "sliding_window"), count(0, 2**31 - 1)),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), OBJECT),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), _NAME),
    "mlp_only_layers": LAYERS,
    # EXAONE 4 writes a text of L (sliding) and G (full), which is repeated.
    "sliding_window_pattern": Kind(
        f"{_PERIOD.wanted}, or a text of L and G",
        lambda value: (
            bool(value) and not set(value) - set("LG")
            if isinstance(value, str)
            else _PERIOD.accepts(value)
        ),
    ),
}
_PER_LAYER = {
    "layer_types": TEXT,
    "no_rope_layers": Kind("true, false, 1 or 0", lambda value: isinstance(value, int)),
}


def check_fields(config: Config) -> None:
    """Checks the fields that the families read before they compute: sizes, names and lists.

    Null and a missing field are left to the families.

    Raises:
      ValueError: with each field of another type than it must have, or above its greatest value.
    """
    layers, per_layer = (
        config.get("num_hidden_layers"),
        "entries, one for each of num_hidden_layers",
    )
    many = layers if isinstance(layers, int) else None
    lists = {
        name: list_of(kind, per_layer, many)
        for name, kind in _PER_LAYER.items()
        if config.get(name)
    }
    check(config, {**_KINDS, **lists})


def given(config: Config, name: str, default: object) -> Any:
    """Returns a field, or `default` if it is missing or null."""
    return default if config.get(name) is None else config[name]


def check_sizes(config: Config, *names: str, optional: tuple[str, ...] = ()) -> None:
    """Raises ValueError unless each field is a whole number of at least 1.

    Fields in `optional` may be missing or null.
    """
    for name in (*names, *(n for n in optional if config.get(n) is not None)):
        count().read(config, name)


def flag(config: Config, name: str, default: bool) -> bool:
    """Returns a boolean field.

    Null counts as missing, unless the default is true: transformers read a null there as false for
    years, and now refuses it.

    Raises ValueError for another value: Python would take the string "false" for true.
    """
    value = config.get(name, default)
    return FLAG.of(name, False if value is None and not default else value)


def number(
    config: Config,
    name: str,
    default: float | None = None,
    *,
    above: float = 0.0,
    least: float | None = None,
    most: float | None = None,
) -> float:
    """Returns a number above `above` (or of at least `least`, if given) and of at most `most`.

    Raises:
      ValueError: another value, or null.
      KeyError: the field is missing, and has no default.
    """
    value = config[name] if default is None else config.get(name, default)
    kind = real(above=above if least is None else None, least=least, most=most)
    return float(kind.of(name, value))


def refuse(config: Config, **expected: object) -> None:
    """Raises ValueError if a field has another value than `expected`, the only supported one.

    A missing field or null is accepted.
    """
    for name, supported in expected.items():
        value = config.get(name)
        if value is not None and value != supported:
            raise ValueError(
                f"{name}={shown(value)} is not supported for {config['model_type']}; "
                f"specjax has {supported!r}"
            )


def activation(name: object) -> str:
    """Maps Hugging Face's name of an activation function to ours."""
    return _ACTIVATIONS[one_of(_ACTIVATIONS).of("activation", name)]


def activation_name(ours: str) -> str:
    """Maps our name of an activation function to Hugging Face's."""
    return next(theirs for theirs, name in _ACTIVATIONS.items() if name == ours)


def read_windows(config: Config, layer_types: list[str]) -> tuple[int | None, ...]:
    """Returns each layer's window: `sliding_window` for sliding_attention, None for full_attention.

    The result is () if no layer slides.  `layer_types` is the default of the field of that name.
    """
    types = config.get("layer_types") or layer_types
    list_of(_ATTENTION).of("layer_types", types)
    if "sliding_attention" not in types:
        return ()
    check_sizes(config, "sliding_window")
    return tuple(
        config["sliding_window"] if kind == "sliding_attention" else None for kind in types
    )


def write_windows(windows: tuple[int | None, ...]) -> Config:
    """Returns the fields `sliding_window` and `layer_types`."""
    window = next((w for w in windows if w is not None), None)
    types = ["full_attention" if w is None else "sliding_attention" for w in windows]
    return {"sliding_window": window, **({"layer_types": types} if types else {})}
