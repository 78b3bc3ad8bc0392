"""Declares the format of Medusa heads in the authors' code."""

from __future__ import annotations

import re

from specjax.methods.medusa.drafter import MedusaAdapter
from specjax.methods.medusa.folder import load_medusa
from specjax.methods.published import Description, Format, Tensors
from specjax.models import Config, LanguageModel

_BLOCK = re.compile(r"\d+\.\d+\.linear\.(weight|bias)")


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


# Heads are whole on each device.  `save_medusa` writes the only layout.
MEDUSA = Format(
    matches=lambda config, tensors: any(map(_BLOCK.fullmatch, tensors)),
    read=lambda folder, config, tensors, target, rules: load_medusa(folder, target),
    describe=_describe,
    makes=lambda drafter: isinstance(drafter, MedusaAdapter),
    layouts={},
)
