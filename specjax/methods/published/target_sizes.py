"""Checks that a folder of a drafter is for a target of these sizes."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import cast

from specjax._internal.fields import Kind, count, list_of
from specjax.methods.published.drafter import sizes_of
from specjax.methods.published.format import Tensors
from specjax.methods.published.shared import TABLES
from specjax.methods.published.vocabulary import used_tokens
from specjax.models import Config, LanguageModel


def counted_taps(named: Mapping[str, object], added: Mapping[str, int]) -> tuple[int, ...] | None:
    """Returns the layers of the target that a drafter reads, counted from the embedding as 0.

    Args:
      named: the lists of layers in a configuration, by the names of their fields.
      added: the number to add to the ids of each field, since some layouts count from 0.

    Returns:
      None if no field names layers.

    Raises:
      ValueError: a field without a list of layers, or fields that name different ones.
    """
    found = {}
    for name, ids in named.items():
        least = -added[name]
        layer = count(least).accepts
        list_of(Kind("a layer of the target", layer), "layers").of(name, ids)
        found[name] = tuple(i + added[name] for i in cast(list[int], ids))
    if len(set(found.values())) > 1:
        words = "; ".join(f"{name} means {list(taps)}" for name, taps in found.items())
        raise ValueError(
            f"fields name different layers of the target ({words}, counted from the embedding as "
            "0): keep the field that the drafter was trained with"
        )
    return next(iter(found.values()), None)


def check_taps(taps: tuple[int, ...], num_layers: int, target: str) -> None:
    """Raises ValueError unless the target has the layers."""
    if max(taps) > num_layers:
        raise ValueError(
            f"the drafter reads the outputs of the layers {list(taps)}, and {target} has "
            f"{num_layers} layers: pass the target that the drafter was trained for"
        )


_PADDING = 0.02
"""The greatest share of a vocabulary by which publishers pad it; it is 0.9 % in GPT-NeoX."""


def check_target(
    folder: pathlib.Path, config: Config, layers: Config, target: LanguageModel
) -> None:
    """Checks the sizes of the target that a configuration states.

    The `vocab_size` of the `layers` is the target's, also where the drafter has a vocabulary of its
    own.

    Raises:
      ValueError: one of them is not the target's; the message names the field.
    """
    hidden_size, vocab_size, num_layers = sizes_of(target, folder.name)
    stated, used = layers.get("vocab_size"), used_tokens(target)
    told = [
        ("num_target_layers", config.get("num_target_layers"), num_layers),
        ("target_hidden_size", config.get("target_hidden_size"), hidden_size),
    ]
    sizes = (stated, vocab_size) if isinstance(stated, int) else (0,)
    if min(sizes) < used or max(sizes) > (1 + _PADDING) * used:
        told.append(("vocab_size", stated, vocab_size))
    wrong = [row for row in told if row[1] not in (None, row[2])]
    if wrong:
        words = ", ".join(
            f"{name} is {found}, and {target.name} has {size}" for name, found, size in wrong
        )
        raise ValueError(f"{folder}: {words}: pass the target that the drafter was trained for")


def check_features(
    folder: pathlib.Path, tensors: Tensors, size: int, num_taps: int, hidden: int
) -> None:
    """Raises ValueError if `fc.weight` is there and does not read the target's hidden states."""
    wanted = (size, num_taps * hidden)
    if "fc.weight" in tensors and tensors["fc.weight"].shape != wanted:
        raise ValueError(
            f"{folder}: fc.weight has shape {list(tensors['fc.weight'].shape)}; hidden size {size} "
            f"and {num_taps} layers of a target of hidden size {hidden} need {list(wanted)}: pass "
            "the target that the drafter was trained for"
        )


def check_width(
    folder: pathlib.Path, shares: tuple[str, ...], size: int, target: LanguageModel
) -> None:
    """Raises ValueError if a drafter of hidden size `size` cannot use the target's tables."""
    # A few targets have an embedding of another width.
    width = target.model.module.config.embedding_size or sizes_of(target, folder.name)[0]
    if shares and size != width:
        names = " and ".join(f"{part} ({TABLES[part].name})" for part in shares)
        raise ValueError(
            f"{folder} has no {names} of its own, and its hidden size {size} is not that of the "
            f"tables of {target.name}, {width}: pass a drafter with tables of its own, or the "
            "target that it was trained for"
        )
