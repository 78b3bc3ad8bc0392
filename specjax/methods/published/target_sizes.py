"""Checks that a folder of a drafter is for a target of these sizes."""

from __future__ import annotations

import pathlib

from specjax.methods.published.drafter import sizes_of
from specjax.methods.published.format import Tensors
from specjax.methods.published.shared import TABLES
from specjax.methods.published.vocabulary import used_tokens
from specjax.models import Config, LanguageModel

_PADDING = 0.02
"""The greatest share of a vocabulary by which publishers pad it; it is 0.9 % in GPT-NeoX."""


def check_target(
    folder: pathlib.Path, config: Config, layers: Config, target: LanguageModel
) -> None:
    """Checks the sizes of the target that a configuration states.

    Args:
      folder: for messages.
      config: of the drafter.
      layers: of its layers.  `vocab_size` is the target's, also where the drafter has a vocabulary
        of its own.
      target: that the drafter is loaded for.

    Raises:
      ValueError: one of them is not the target's; the message names the field.
    """
    hidden_size, vocab_size, num_layers = sizes_of(target, folder.name)
    told = {"num_target_layers": num_layers, "target_hidden_size": hidden_size}
    for name, size in told.items():
        if config.get(name) not in (None, size):
            raise ValueError(
                f"{folder}: {name} is {config[name]}, and {target.name} has {size}: "
                "pass the target that the drafter was trained for"
            )
    stated, used = layers.get("vocab_size"), used_tokens(target)
    if stated in (None, vocab_size):
        return
    is_padding = type(stated) is int and min(stated, vocab_size) >= used
    if not is_padding or max(stated, vocab_size) > (1 + _PADDING) * used:
        raise ValueError(
            f"{folder}: vocab_size is {stated}, and {target.name} has {vocab_size}: pass the "
            "target that the drafter was trained for"
        )


def check_features(
    folder: pathlib.Path, tensors: Tensors, size: int, num_taps: int, hidden: int
) -> None:
    """Raises ValueError if `fc.weight` is there and does not read the target's hidden states.

    Args:
      folder: for messages.
      tensors: of the drafter.
      size: its hidden size.
      num_taps: the layers of the target that it reads.
      hidden: the hidden size of the target.
    """
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
    """Raises ValueError if a drafter of hidden size `size` cannot use the target's tables.

    Args:
      folder: for messages.
      shares: the tables among the target's "embedding" and "head" that the drafter uses.
      size: the hidden size of the drafter.
      target: that the drafter is loaded for.
    """
    # A few targets have an embedding of another width.
    width = target.model.module.config.embedding_size or sizes_of(target, folder.name)[0]
    if shares and size != width:
        names = " and ".join(f"{part} ({TABLES[part].name})" for part in shares)
        raise ValueError(
            f"{folder} has no {names} of its own, and its hidden size {size} is not that of the "
            f"tables of {target.name}, {width}: pass a drafter with tables of its own, or the "
            "target that it was trained for"
        )
