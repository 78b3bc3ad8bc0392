"""The layers of the target that an EAGLE-3 head reads, by the conventions of its publishers.

Here tap 0 is the embedding, and tap i the output of the i-th layer, counted from 1.

    eagle_aux_hidden_state_layer_ids                 as it is           vLLM, speculators
    eagle_config.layer_ids                           as it is           vLLM
    eagle_config.eagle_aux_hidden_state_layer_ids    + 1                NVIDIA ModelOpt, SGLang
    target_layer_ids                                 + 1, -1 is 0       DeepSpec
    none of them                                     2, L // 2, L - 3   the authors of EAGLE
"""

from __future__ import annotations

import pathlib

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
    found: dict[str, tuple[int, ...]] = {}
    for key, offset in _ADDED.items():
        ids = named.get(key)
        if not ids:  # missing, null or empty: an exporter wrote the key without a value
            continue
        if not isinstance(ids, list) or not all(type(i) is int and i + offset >= 0 for i in ids):
            raise ValueError(f"{folder}: {key} is {ids!r}; it must be a list of layers")
        if ids != sorted(set(ids)):
            raise ValueError(f"{folder}: {key} is {ids}; the layers must be distinct and ascending")
        found[key] = tuple(i + offset for i in ids)
    if len(set(found.values())) > 1:
        words = "; ".join(f"{key} means {list(taps)}" for key, taps in found.items())
        raise ValueError(
            f"{folder}: keys disagree about the layers of the target ({words}, as numbers of "
            "outputs): remove the wrong one from config.json"
        )
    return next(iter(found.values()), None)


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


def check_taps(folder: pathlib.Path, taps: tuple[int, ...], num_layers: int, target: str) -> None:
    """Raises ValueError unless the target has the layers."""
    if taps[-1] > num_layers:
        raise ValueError(
            f"{folder} reads the output of layer {taps[-1]}, and {target} has {num_layers} "
            "layers: pass the target that the drafter was trained for"
        )
