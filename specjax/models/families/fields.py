"""Fields of a Hugging Face configuration that several families share: read, checked, and written back."""

from __future__ import annotations

import json
import math
from typing import Any

from specjax.models.rope import Rope

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


def check_sizes(config: dict[str, Any], *names: str, optional: tuple[str, ...] = ()) -> None:
    """Raises ValueError unless each field is a whole number of at least 1; `optional` ones may be missing or null."""
    for name in (*names, *(n for n in optional if config.get(n) is not None)):
        if isinstance(config[name], bool) or not isinstance(config[name], int) or config[name] < 1:
            raise ValueError(f"{name} is {config[name]!r}; it must be a whole number of at least 1")


def flag(config: dict[str, Any], name: str, default: bool) -> bool:
    """A switch.

    Raises ValueError unless it is true, false or left out: the string "false" would count as true.
    """
    found = config.get(name, default)
    if not isinstance(found, bool):
        raise ValueError(f"{name} is {json.dumps(found)}; it must be true or false")
    return found


def number(
    config: dict[str, Any],
    name: str,
    default: float | None = None,
    *,
    above: float = 0.0,
    least: float | None = None,
    most: float = _GREATEST,
) -> float:
    """A number above `above` (or of at least `least`, where that is given) and of at most `most`.

    JSON as Python reads it has NaN and infinities, and a model that computes with one writes a
    single token for ever.

    Raises:
      ValueError: another value, or null.
      KeyError: the field is missing, and has no default.
    """
    found = config[name] if default is None else config.get(name, default)
    fits = isinstance(found, int | float) and not isinstance(found, bool)
    # NaN fails every comparison, and so it is refused.
    if not (fits and found <= most and (found > above if least is None else found >= least)):
        bounds = f"above {above:g}" if least is None else f"of at least {least:g}"
        bounds += "" if most == _GREATEST else f" and at most {most:g}"
        raise ValueError(f"{name} is {json.dumps(found)}; it must be a finite number {bounds}")
    return found


def refuse(config: dict[str, Any], **expected: Any) -> None:
    """Raises ValueError where a switch has another value than the one that is implemented (null counts as missing)."""
    for name, value in expected.items():
        found = config.get(name)
        if found is not None and found != value:
            raise ValueError(
                f"{name}={found!r} is not supported for {config['model_type']}; specjax has {value!r}"
            )


def activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"activation {name!r} is not supported; specjax has {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def activation_name(ours: str) -> str:
    return next(theirs for theirs, name in _ACTIVATIONS.items() if name == ours)


def read_rope(config: dict[str, Any], theta: float = 10000.0, fraction: float = 1.0) -> Rope:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before).

    Args:
      config: the whole configuration.
      theta, fraction: what the family takes where the configuration is silent.
    """
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    names = ("rope_theta", "partial_rotary_factor")
    outside = {name: config[name] for name in names if name in config}
    return rope_of({**outside, **found}, theta, fraction, config)


def rope_of(found: dict[str, Any], theta: float, fraction: float, config: dict[str, Any]) -> Rope:
    """A dictionary of rope parameters, read.

    Args:
      found: the dictionary; null counts as missing.
      theta, fraction: what holds where it is silent.
      config: the whole configuration.

    Raises:
      ValueError: a kind that is not implemented, or a number out of its range.
      KeyError: a field is missing.
    """
    found = {name: value for name, value in found.items() if value is not None}
    kind = found.get("rope_type", found.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # an early name
    # Frequencies fall as powers of the base: one of 1 or less would not let them.
    theta = number(found, "rope_theta", theta, above=1.0)
    fraction = number(found, "partial_rotary_factor", fraction, most=1.0)
    if kind == "default":
        return Rope(theta, fraction=fraction)
    if kind == "linear":
        return Rope(theta, kind, fraction, factor=number(found, "factor", least=1.0))
    if kind not in ("llama3", "yarn", "longrope"):
        raise ValueError(
            f"rope type {kind!r} is not supported; specjax reads default, linear, llama3, yarn and longrope"
        )
    most = config.get("max_position_embeddings")
    name = "original_max_position_embeddings"
    original = found.get(name) or config.get(name) or (most if kind == "yarn" else None)
    if original is None:
        raise KeyError(name)
    check_sizes({name: original}, name)
    if kind == "llama3":
        low = number(found, "low_freq_factor")
        return Rope(
            theta,
            kind,
            fraction,
            factor=number(found, "factor", least=1.0),
            low_freq_factor=low,
            high_freq_factor=number(found, "high_freq_factor", above=low),
            original_max_positions=original,
        )
    amplitude = number(found, "attention_factor") if "attention_factor" in found else None
    if kind == "yarn":
        if found.get("mscale") or found.get("mscale_all_dim"):
            raise ValueError("mscale of a yarn rope is not supported; specjax has attention_factor")
        factor = number(found, "factor", least=1.0)
        return Rope(
            theta,
            kind,
            fraction,
            amplitude=0.1 * math.log(factor) + 1 if amplitude is None else amplitude,
            factor=factor,
            original_max_positions=original,
            beta_fast=number(found, "beta_fast", 32.0),
            beta_slow=number(found, "beta_slow", 1.0),
            truncate=flag(found, "truncate", True),
        )
    factor = number(found, "factor", None if most is None else most / original)
    factors = tuple(number({"short_factor": x}, "short_factor") for x in found["short_factor"])
    if amplitude is None:
        amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return Rope(
        theta,
        kind,
        fraction,
        amplitude=amplitude,
        factor=factor,
        original_max_positions=original,
        factors=factors,
    )


def write_rope(rope: Rope) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, the spelling that all versions of transformers read."""
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
        }
    if rope.kind == "yarn":
        scaling |= {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
        }
    if rope.kind == "longrope":
        # Only the short factors are kept, and with them the context that they serve.
        scaling |= {"short_factor": list(rope.factors), "long_factor": list(rope.factors)}
    if rope.kind in ("yarn", "longrope"):
        scaling["attention_factor"] = rope.amplitude
    if rope.kind in ("llama3", "yarn", "longrope"):
        scaling["original_max_position_embeddings"] = rope.original_max_positions
    found = {"rope_theta": rope.theta, "rope_scaling": None if rope.kind == "default" else scaling}
    return found if rope.fraction == 1.0 else {**found, "partial_rotary_factor": rope.fraction}


def read_windows(config: dict[str, Any], layer_types: list[str]) -> tuple[int | None, ...]:
    """`sliding_window` of the layers of type sliding_attention; `layer_types` where the configuration names none."""
    found = config.get("layer_types") or layer_types
    unknown = set(found) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(
            f"layer types {', '.join(sorted(unknown))} are not supported; specjax has full and sliding"
        )
    if "sliding_attention" not in found:
        return ()
    check_sizes(config, "sliding_window")
    return tuple(
        config["sliding_window"] if kind == "sliding_attention" else None for kind in found
    )


def write_windows(windows: tuple[int | None, ...]) -> dict[str, Any]:
    """`sliding_window` and `layer_types`."""
    window = next((w for w in windows if w is not None), None)
    types = ["full_attention" if w is None else "sliding_attention" for w in windows]
    return {"sliding_window": window, **({"layer_types": types} if types else {})}
