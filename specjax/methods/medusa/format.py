"""Declares the format of Medusa heads in the authors' code."""

from __future__ import annotations

import pathlib
import re

from specjax.methods.drafter import Drafter
from specjax.methods.medusa.drafter import MedusaAdapter
from specjax.methods.medusa.folder import load_medusa
from specjax.methods.published import Description, Format, Tensors
from specjax.models import Config, LanguageModel
from specjax.parallel import Rules

_BLOCK = re.compile(r"\d+\.\d+\.linear\.(weight|bias)")


def _matches(config: Config, tensors: Tensors) -> bool:
    return any(map(_BLOCK.fullmatch, tensors))


def _read(
    folder: pathlib.Path, config: Config, tensors: Tensors, target: LanguageModel, rules: Rules
) -> Drafter:
    return load_medusa(folder, target)  # whole on each device


def _describe(config: Config, tensors: Tensors, target: LanguageModel | None) -> Description:
    heads = 1 + max(int(name.split(".")[0]) for name in tensors)
    own = any(re.fullmatch(r"\d+\.\d+\.weight", name) for name in tensors)
    return Description(
        method="Medusa",
        packaging="the authors' code, version " + ("1" if own else "2"),
        taps=(),
        num_drafts=heads,
        shares=() if own else ("head",),
    )


def _makes(drafter: Drafter) -> bool:
    return isinstance(drafter, MedusaAdapter)


# `save_medusa` writes the only layout.
MEDUSA = Format(_matches, _read, _describe, _makes, layouts={})
