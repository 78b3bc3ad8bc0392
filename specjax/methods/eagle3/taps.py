"""The layers of the target that an EAGLE-3 head reads, by the conventions of its publishers.

Here tap 0 is the embedding, and tap i the output of the i-th layer, counted from 1.

    eagle_aux_hidden_state_layer_ids                 as it is           vLLM, speculators
    eagle_config.layer_ids                           as it is           vLLM
    eagle_config.eagle_aux_hidden_state_layer_ids    + 1                NVIDIA ModelOpt, SGLang
    target_layer_ids                                 + 1, -1 is 0       DeepSpec
    none of them                                     2, L // 2, L - 3   the authors of EAGLE
    eagle_config.use_aux_hidden_state false          L + 1              NVIDIA ModelOpt, vLLM

The last of these heads have no `fc`: the target's last state, after its final norm, is the feature.
"""

from __future__ import annotations

import pathlib

from specjax import files
from specjax.methods.published import counted_taps
from specjax.models import Config

_OUTER, _INNER = "eagle_config", "eagle_aux_hidden_state_layer_ids"

_ADDED = {_INNER: 0, f"{_OUTER}.{_INNER}": 1, f"{_OUTER}.layer_ids": 0, "target_layer_ids": 1}
"""The number that is added to the ids of a key."""


def read_taps(folder: pathlib.Path, config: Config) -> tuple[int, ...] | None:
    """Returns the taps that a configuration names, in ascending order; None: it names none.

    Raises:
      ValueError: ids that are not a list of distinct, ascending layers, or two keys that disagree.
    """
    inner = config.get(_OUTER) or {}
    named = {**config, **{f"{_OUTER}.{name}": ids for name, ids in inner.items()}}
    # A key that is missing, null or empty: an exporter wrote it without a value.
    present = {key: ids for key in _ADDED if (ids := named.get(key))}
    with files.named(folder / files.CONFIG):
        taps = counted_taps(present, _ADDED)
        if taps is not None and list(taps) != sorted(set(taps)):
            raise ValueError(
                f"{' and '.join(present)}: the layers {list(taps)} must be distinct and ascending"
            )
    return taps


def reads_last_state(config: Config) -> bool:
    """Returns whether a head reads the target's last state only, after its final norm."""
    return (config.get(_OUTER) or {}).get("use_aux_hidden_state") is False


def write_taps(taps: tuple[int, ...], *, nested: bool) -> Config:
    """Returns the fields of the taps for vLLM and speculators, with `nested` also for SGLang."""
    ids = {key: [tap - added for tap in taps] for key, added in _ADDED.items()}
    outer = {_OUTER: {"use_aux_hidden_state": True, _INNER: ids[f"{_OUTER}.{_INNER}"]}}
    return {_INNER: ids[_INNER], **(outer if nested else {})}


def is_model_opt(config: Config) -> bool:
    """Returns whether a configuration names its taps as only ModelOpt does."""
    return _OUTER in config and _INNER not in config


def default_taps(folder: pathlib.Path, num_layers: int) -> tuple[int, ...]:
    """Returns the taps of a head whose configuration names none.

    Raises:
      ValueError: the target has too few layers for them.
    """
    taps = (2, num_layers // 2, num_layers - 3)
    if not 0 < taps[0] < taps[1] < taps[2]:
        raise ValueError(
            f"{folder} names no layers of the target, and the default (2, L // 2, L - 3) is "
            f"{taps} for {num_layers} layers: name them in config.json as {_INNER}"
        )
    return taps
