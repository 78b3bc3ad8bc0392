"""Fields of a Hugging Face configuration that several families read, check and write alike."""

from __future__ import annotations

import json
import math

from specjax.models.families.family import Config
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


def check_sizes(config: Config, *names: str, optional: tuple[str, ...] = ()) -> None:
    """Raises ValueError unless each field is a whole number of at least 1.

    Fields in `optional` may be missing or null.
    """
    for name in (*names, *(n for n in optional if config.get(n) is not None)):
        if isinstance(config[name], bool) or not isinstance(config[name], int) or config[name] < 1:
            raise ValueError(f"{name} is {config[name]!r}; it must be a whole number of at least 1")


def flag(config: Config, name: str, default: bool) -> bool:
    """A boolean field.

    Raises ValueError unless it is true, false or missing: Python would take the string "false" for
    true.
    """
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {json.dumps(value)}; it must be true or false")
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
    """A number above `above` (or of at least `least`, if that is given) and of at most `most`.

    Python's JSON reader accepts NaN and infinities.  A model that computes with one would emit the
    same token for ever.

    Raises:
      ValueError: another value, or null.
      KeyError: the field is missing, and has no default.
    """
    value = config[name] if default is None else config.get(name, default)
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN fails every comparison, so it is refused too.
    if not (fits and value <= most and (value > above if least is None else value >= least)):
        bounds = f"above {above:g}" if least is None else f"of at least {least:g}"
        bounds += "" if most == _GREATEST else f" and at most {most:g}"
        raise ValueError(f"{name} is {json.dumps(value)}; it must be a finite number {bounds}")
    return value


def refuse(config: Config, **expected: object) -> None:
    """Raises ValueError if a field has another value than the `expected` one, the only supported.

    A missing field or null is accepted.
    """
    for name, supported in expected.items():
        value = config.get(name)
        if value is not None and value != supported:
            raise ValueError(
                f"{name}={value!r} is not supported for {config['model_type']}; "
                f"specjax has {supported!r}"
            )


def activation(name: str) -> str:
    """Hugging Face's name of an activation function -> ours."""
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"activation {name!r} is not supported; specjax has {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def activation_name(ours: str) -> str:
    """Our name of an activation function -> Hugging Face's."""
    return next(theirs for theirs, name in _ACTIVATIONS.items() if name == ours)


def read_rope(config: Config, theta: float = 10000.0, fraction: float = 1.0) -> Rope:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (older).

    Args:
      config: the whole configuration.
      theta, fraction: the family's defaults, for fields that the configuration leaves out.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    names = ("rope_theta", "partial_rotary_factor")
    outside = {name: config[name] for name in names if name in config}
    return rope_of({**outside, **scaling}, theta, fraction, config)


def rope_of(params: Config, theta: float, fraction: float, config: Config) -> Rope:
    """Read a dictionary of rope parameters.

    Args:
      params: the dictionary; null counts as missing.
      theta, fraction: defaults, for fields that the dictionary leaves out.
      config: the whole configuration.

    Raises:
      ValueError: a kind that is not implemented, or a number out of its range.
      KeyError: a field is missing.
    """
    params = {name: value for name, value in params.items() if value is not None}
    kind = params.get("rope_type", params.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # an early name
    # Frequencies are negative powers of the base, so they only decrease if it is above 1.
    theta = number(params, "rope_theta", theta, above=1.0)
    fraction = number(params, "partial_rotary_factor", fraction, most=1.0)
    if kind == "default":
        return Rope(theta, fraction=fraction)
    if kind == "linear":
        return Rope(theta, kind, fraction, factor=number(params, "factor", least=1.0))
    if kind not in ("llama3", "yarn", "longrope"):
        raise ValueError(
            f"rope type {kind!r} is not supported; "
            "specjax reads default, linear, llama3, yarn and longrope"
        )
    most = config.get("max_position_embeddings")
    name = "original_max_position_embeddings"
    original = params.get(name) or config.get(name) or (most if kind == "yarn" else None)
    if original is None:
        raise KeyError(name)
    check_sizes({name: original}, name)
    if kind == "llama3":
        low = number(params, "low_freq_factor")
        return Rope(
            theta,
            kind,
            fraction,
            factor=number(params, "factor", least=1.0),
            low_freq_factor=low,
            high_freq_factor=number(params, "high_freq_factor", above=low),
            original_max_positions=original,
        )
    amplitude = number(params, "attention_factor") if "attention_factor" in params else None
    if kind == "yarn":
        if params.get("mscale") or params.get("mscale_all_dim"):
            raise ValueError("mscale of a yarn rope is not supported; specjax has attention_factor")
        factor = number(params, "factor", least=1.0)
        return Rope(
            theta,
            kind,
            fraction,
            amplitude=0.1 * math.log(factor) + 1 if amplitude is None else amplitude,
            factor=factor,
            original_max_positions=original,
            beta_fast=number(params, "beta_fast", 32.0),
            beta_slow=number(params, "beta_slow", 1.0),
            truncate=flag(params, "truncate", True),
        )
    factor = number(params, "factor", None if most is None else most / original)
    factors = tuple(number({"short_factor": x}, "short_factor") for x in params["short_factor"])
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


def write_rope(rope: Rope) -> Config:
    """`rope_theta` and `rope_scaling`, which all versions of transformers read."""
    scaling: Config = {"rope_type": rope.kind, "factor": rope.factor}
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
        # `read_rope` keeps only the short factors, and the context length that they serve.
        scaling |= {"short_factor": list(rope.factors), "long_factor": list(rope.factors)}
    if rope.kind in ("yarn", "longrope"):
        scaling["attention_factor"] = rope.amplitude
    if rope.kind in ("llama3", "yarn", "longrope"):
        scaling["original_max_position_embeddings"] = rope.original_max_positions
    fields = {"rope_theta": rope.theta, "rope_scaling": None if rope.kind == "default" else scaling}
    return fields if rope.fraction == 1.0 else {**fields, "partial_rotary_factor": rope.fraction}


def read_windows(config: Config, layer_types: list[str]) -> tuple[int | None, ...]:
    """The window of each layer: `sliding_window` for sliding_attention, None for full_attention.

    Returns () if no layer slides.  `layer_types` is the default of the field of that name.
    """
    types = config.get("layer_types") or layer_types
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(
            f"layer types {', '.join(sorted(unknown))} are not supported; "
            "specjax has full and sliding"
        )
    if "sliding_attention" not in types:
        return ()
    check_sizes(config, "sliding_window")
    return tuple(
        config["sliding_window"] if kind == "sliding_attention" else None for kind in types
    )


def write_windows(windows: tuple[int | None, ...]) -> Config:
    """The fields `sliding_window` and `layer_types`."""
    window = next((w for w in windows if w is not None), None)
    types = ["full_attention" if w is None else "sliding_attention" for w in windows]
    return {"sliding_window": window, **({"layer_types": types} if types else {})}
