"""Fields of a Hugging Face configuration that several families share: read, checked, and written back."""

from __future__ import annotations

import math
from typing import Any

from specjax.models.rope import Rope

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


def refuse(config: dict[str, Any], **expected: Any) -> None:
    """Raises ValueError where a switch has another value than the one that is implemented (null counts as missing)."""
    for name, value in expected.items():
        found = config.get(name)
        if found is not None and found != value:
            raise ValueError(f"{name}={found!r} is not supported for {config['model_type']}; specjax has {value!r}")


def activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not supported; specjax has {', '.join(_ACTIVATIONS)}")
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
    theta = found.get("rope_theta", config.get("rope_theta", theta))
    fraction = found.get("partial_rotary_factor", config.get("partial_rotary_factor", fraction))
    return rope_of(found, theta, fraction, config)


def rope_of(found: dict[str, Any], theta: float, fraction: float, config: dict[str, Any]) -> Rope:
    """A dictionary of rope parameters, read.  `config` is the whole configuration."""
    kind = found.get("rope_type", found.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # an early name
    if kind == "default":
        return Rope(theta, fraction=fraction)
    if kind == "linear":
        return Rope(theta, kind, fraction, factor=found["factor"])
    if kind not in ("llama3", "yarn", "longrope"):
        raise ValueError(
            f"rope type {kind!r} is not supported; specjax reads default, linear, llama3, yarn and longrope"
        )
    most = config.get("max_position_embeddings")
    original = found.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    original = original or (most if kind == "yarn" else None)
    if original is None:
        raise KeyError("original_max_position_embeddings")
    if kind == "llama3":
        return Rope(
            theta,
            kind,
            fraction,
            factor=found["factor"],
            low_freq_factor=found["low_freq_factor"],
            high_freq_factor=found["high_freq_factor"],
            original_max_positions=original,
        )
    if kind == "yarn":
        if found.get("mscale") or found.get("mscale_all_dim"):
            raise ValueError("mscale of a yarn rope is not supported; specjax has attention_factor")
        amplitude = found.get("attention_factor")
        return Rope(
            theta,
            kind,
            fraction,
            amplitude=0.1 * math.log(max(found["factor"], 1)) + 1 if amplitude is None else amplitude,
            factor=found["factor"],
            original_max_positions=original,
            beta_fast=found.get("beta_fast") or 32.0,
            beta_slow=found.get("beta_slow") or 1.0,
            truncate=found.get("truncate", True),
        )
    amplitude, factor = found.get("attention_factor"), found.get("factor") or most / original
    if amplitude is None:
        amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return Rope(
        theta,
        kind,
        fraction,
        amplitude=amplitude,
        factor=factor,
        original_max_positions=original,
        factors=tuple(found["short_factor"]),
    )


def write_rope(rope: Rope) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, the spelling that all versions of transformers read."""
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
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
        raise ValueError(f"layer types {', '.join(sorted(unknown))} are not supported; specjax has full and sliding")
    if "sliding_attention" not in found:
        return ()
    check_sizes(config, "sliding_window")
    return tuple(config["sliding_window"] if kind == "sliding_attention" else None for kind in found)


def write_windows(windows: tuple[int | None, ...]) -> dict[str, Any]:
    """`sliding_window` and `layer_types`."""
    window = next((w for w in windows if w is not None), None)
    types = ["full_attention" if w is None else "sliding_attention" for w in windows]
    return {"sliding_window": window, **({"layer_types": types} if types else {})}
