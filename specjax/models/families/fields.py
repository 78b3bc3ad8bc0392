"""Reads, checks and writes the fields of a configuration that several families share."""

from __future__ import annotations

import json
from typing import Any

from specjax._internal.checks import shown
from specjax.models.config import MOST
from specjax.models.families.family import Config

_LEAST = 1.2e-38  # of float32
_GREATEST = 3.4e38  # of float32

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
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
    "num_local_experts": "num_experts",
    "num_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "expert_size",
    "decoder_sparse_step": "num_layers",
    "no_rope_layer_interval": "num_layers",
    "sliding_window_pattern": "num_layers",
    "_sliding_window_pattern": "num_layers",
}
"""Fields that are whole numbers of at least 1, and our size with the same greatest value."""

_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("rope_parameters", "rope_scaling"), (dict,)),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), (str,)),
}
_PER_LAYER: dict[str, tuple[type, ...]] = {"layer_types": (str,), "no_rope_layers": (bool, int)}


def check_fields(config: Config) -> None:
    """Checks the fields that the families read before they compute: sizes, names and lists.

    Null and a missing field are left to the families.

    Raises:
      ValueError: a field of another type than it must have, or above its greatest value.
    """
    for name, ours in _SIZES.items():
        if config.get(name) is not None:
            check_sizes(config, name)
            if config[name] > MOST[ours]:
                raise ValueError(
                    f"{name} is {shown(config[name])}; specjax reads at most {MOST[ours]}: the "
                    "file is damaged, so download it again"
                )
    for name in ("max_window_layers", "sliding_window"):
        value = config.get(name)
        if value is not None and not (_is_whole(value) and 0 <= value < 2**31):
            raise ValueError(f"{name} is {shown(value)}; it must be a whole number of at least 0")
    for name, kinds in _KINDS.items():
        value = config.get(name)
        if value is not None and not isinstance(value, kinds):
            raise ValueError(f"{name} is {shown(value)}; it must be {_written(kinds)}, or null")
    layers = config.get("num_hidden_layers")
    for name, kinds in _PER_LAYER.items():
        value = config.get(name)
        if value and not (
            isinstance(value, list)
            and len(value) == layers
            and all(isinstance(entry, kinds) for entry in value)
        ):
            raise ValueError(
                f"{name} is {shown(value)}; it must be a list of {layers} entries, one for each of "
                f"num_hidden_layers, and each of them {_written(kinds)}"
            )
    dense = config.get("mlp_only_layers")
    if dense and not (isinstance(dense, list) and all(map(_is_whole, dense))):
        raise ValueError(f"mlp_only_layers is {shown(dense)}; it must be a list of layers")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _written(kinds: tuple[type, ...]) -> str:
    names = {dict: "an object", str: "a text", bool: "true or false", int: "1 or 0"}
    return " or ".join(names[kind] for kind in kinds)


def given(config: Config, name: str, default: object) -> Any:
    """Returns a field, or `default` if it is missing or null."""
    return default if config.get(name) is None else config[name]


def check_sizes(config: Config, *names: str, optional: tuple[str, ...] = ()) -> None:
    """Raises ValueError unless each field is a whole number of at least 1.

    Fields in `optional` may be missing or null.
    """
    for name in (*names, *(n for n in optional if config.get(n) is not None)):
        if not _is_whole(config[name]) or config[name] < 1:
            raise ValueError(
                f"{name} is {shown(config[name])}; it must be a whole number of at least 1"
            )


def flag(config: Config, name: str, default: bool) -> bool:
    """Returns a boolean field.

    Null counts as missing, unless the default is true: transformers read a null there as false for
    years, and now refuses it.

    Raises ValueError for another value: Python would take the string "false" for true.
    """
    value = config.get(name, default)
    value = False if value is None and not default else value
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {_json(value)}; it must be true or false")
    return value


def number(
    config: Config,
    name: str,
    default: float | None = None,
    *,
    above: float = 0.0,
    least: float | None = None,
    most: float = _GREATEST,
) -> float:
    """Returns a number above `above` (or of at least `least`, if given) and of at most `most`.

    Python's JSON reader accepts NaN and infinities.  A model that computes with one would emit the
    same token for ever.

    Raises:
      ValueError: another value, or null.
      KeyError: the field is missing, and has no default.
    """
    value = config[name] if default is None else config.get(name, default)
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN fails every comparison, so it is refused too.  What float32 rounds to 0 is not above 0.
    if least is None and fits:
        fits = value > above and abs(value) >= _LEAST
    elif fits and least is not None:
        fits = value >= least
    if not (fits and value <= most):
        bounds = f"above {above:g}" if least is None else f"of at least {least:g}"
        bounds += "" if most == _GREATEST else f" and at most {most:g}"
        raise ValueError(f"{name} is {_json(value)}; it must be a finite number {bounds}")
    return float(value)


def _json(value: object) -> str:
    """Returns a value as the file has it, cut if it is long."""
    text = json.dumps(value)
    return text if len(text) <= 500 else text[:500] + "..."


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
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ValueError(
            f"activation {shown(name)} is not supported; specjax has {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def activation_name(ours: str) -> str:
    """Maps our name of an activation function to Hugging Face's."""
    return next(theirs for theirs, name in _ACTIVATIONS.items() if name == ours)


def read_windows(config: Config, layer_types: list[str]) -> tuple[int | None, ...]:
    """Returns each layer's window: `sliding_window` for sliding_attention, None for full_attention.

    The result is () if no layer slides.  `layer_types` is the default of the field of that name.
    """
    types = config.get("layer_types") or layer_types
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(
            f"layer_types has {shown(sorted(unknown))}, which is not supported; "
            "specjax has full and sliding"
        )
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
