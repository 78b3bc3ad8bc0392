"""Reads and writes the fields about positions: ropes, and the number of positions."""

from __future__ import annotations

import math
from typing import Any

from specjax._internal.fields import LIST, OBJECT, one_of
from specjax.models.config import MOST, TransformerConfig
from specjax.models.families.family import Config
from specjax.models.families.fields import check_fields, flag, given, number
from specjax.models.rope import Rope, yarn_growth

_FAR = 1e15  # far beyond the bases and factors of ropes that are in use
_ORIGINAL = "original_max_position_embeddings"
_ROPES = one_of(("default", "linear", "dynamic", "llama3", "yarn", "longrope"))


def read_rope(config: Config, theta: float = 10000.0, fraction: float = 1.0) -> Rope:
    """Reads `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (older).

    Args:
      config: the whole configuration.
      theta, fraction: the family's defaults, for fields that the configuration leaves out.
    """
    scaling = _scaling(config)
    names = ("rope_theta", "partial_rotary_factor")
    outside = {name: config[name] for name in names if name in config}
    return rope_of({**outside, **scaling}, theta, fraction, config)


def rope_of(params: Config, theta: float, fraction: float, config: Config) -> Rope:
    """Reads a dictionary of rope parameters.

    Args:
      params: the dictionary; null counts as missing.
      theta, fraction: defaults, for fields that the dictionary leaves out.
      config: the whole configuration.

    Raises:
      ValueError: a kind that is not implemented, or a number out of its range.
      KeyError: a field is missing.
    """
    OBJECT.of("rope_parameters", params)
    params = {name: value for name, value in params.items() if value is not None}
    kind = params.get("rope_type", params.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # an early name
    # Frequencies are negative powers of the base, so they only decrease if it is above 1.
    theta = number(params, "rope_theta", theta, above=1.0, most=_FAR)
    fraction = number(params, "partial_rotary_factor", fraction, most=1.0)
    if kind in ("default", "dynamic"):  # see `read_context`
        return Rope(theta, fraction=fraction)
    if kind == "linear":
        return Rope(theta, kind, fraction, factor=number(params, "factor", least=1.0, most=_FAR))
    _ROPES.of("rope_type", kind)
    most = config.get("max_position_embeddings")
    original = _original(params, config) or (most if kind == "yarn" else None)
    if original is None:
        raise KeyError(_ORIGINAL)
    check_fields({_ORIGINAL: original})
    if kind == "llama3":
        low = number(params, "low_freq_factor", most=_FAR)
        return Rope(
            theta,
            kind,
            fraction,
            factor=number(params, "factor", least=1.0, most=_FAR),
            low_freq_factor=low,
            high_freq_factor=number(params, "high_freq_factor", least=low, most=_FAR),
            original_max_positions=original,
        )
    amplitude = (
        number(params, "attention_factor", most=1e3) if "attention_factor" in params else None
    )
    if kind == "yarn":
        factor = number(params, "factor", least=1.0, most=_FAR)
        mscale, all_dim = (
            number(params, name, 0.0, least=0.0, most=1e3) for name in ("mscale", "mscale_all_dim")
        )
        if amplitude is None:
            amplitude = (
                yarn_growth(factor, mscale) / yarn_growth(factor, all_dim)
                if mscale and all_dim
                else yarn_growth(factor)
            )
        return Rope(
            theta,
            kind,
            fraction,
            amplitude=amplitude,
            mscale_all_dim=all_dim,
            factor=factor,
            original_max_positions=original,
            beta_fast=number(params, "beta_fast", 32.0, most=_FAR),
            beta_slow=number(params, "beta_slow", 1.0, most=_FAR),
            truncate=flag(params, "truncate", True),
        )
    factor = number(params, "factor", None if most is None else most / original, most=_FAR)
    factors = tuple(
        number({"short_factor": factor}, "short_factor", most=_FAR)
        for factor in LIST.read(params, "short_factor")
    )
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


def _scaling(config: Config) -> Config:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _original(params: Config, config: Config) -> Any:
    """Returns the context before scaling, if a file states it; the outer field counts first."""
    return config.get(_ORIGINAL) or params.get(_ORIGINAL)


def read_context(config: Config, rope: Rope | None, default: int = 2048) -> int:
    """Returns the number of positions; the kind of the rope gives the meaning of the file's number.

        default, llama3   `max_position_embeddings`
        linear, yarn      at least `factor` times the context before it was scaled, which is
                          `original_max_position_embeddings`, or else `max_position_embeddings`
        dynamic           `max_position_embeddings`; longer texts have other frequencies
        longrope          the context before it was scaled; longer texts have other frequencies

    Other frequencies would be those of all positions of the text, and keys in the KV cache cannot
    be rotated again.  So a text ends where they would begin.

    Args:
      config: the whole configuration.
      rope: read from it.
      default: the number, if the file has none.
    """
    most = given(config, "max_position_embeddings", default)
    if rope is None:
        return most
    if rope.kind in ("linear", "yarn"):
        before = _original(_scaling(config), config) or most
        check_fields({_ORIGINAL: before})
        most = max(most, int(min(before * rope.factor, MOST["max_positions"])))
    return min(most, rope.original_max_positions) if rope.kind == "longrope" else most


def write_rope(rope: Rope) -> Config:
    """Returns `rope_theta` and `rope_scaling`, which all versions of transformers read."""
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
            **({"mscale_all_dim": rope.mscale_all_dim} if rope.mscale_all_dim else {}),
        }
    if rope.kind == "longrope":
        # `read_rope` keeps only the short factors, and the context length that they serve.
        scaling |= {"short_factor": list(rope.factors), "long_factor": list(rope.factors)}
    if rope.kind in ("yarn", "longrope"):
        scaling["attention_factor"] = rope.amplitude
    if rope.kind in ("llama3", "yarn", "longrope"):
        scaling[_ORIGINAL] = rope.original_max_positions
    fields = {"rope_theta": rope.theta, "rope_scaling": None if rope.kind == "default" else scaling}
    return fields if rope.fraction == 1.0 else {**fields, "partial_rotary_factor": rope.fraction}


def write_positions(c: TransformerConfig) -> Config:
    """Returns the fields of `write_rope`, and the context as `read_context` reads it."""
    if c.rope is None:
        return {"max_position_embeddings": c.max_positions}
    fields, most = write_rope(c.rope), c.max_positions
    if c.rope.kind == "linear":
        before = max(1, round(most / c.rope.factor))
        if int(before * c.rope.factor) == most:
            most = before
        else:  # no whole number of positions was stretched to so many
            fields["rope_scaling"][_ORIGINAL] = max(1, int(most / c.rope.factor))
    return {"max_position_embeddings": most, **fields}
