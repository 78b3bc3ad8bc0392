"""The law of folders that lack a tensor: each is refused by the name of that tensor."""

from __future__ import annotations

import pathlib
import re

import pytest

from specjax import LanguageModel
from specjax.drafters.folder import open_drafter, recognised
from specjax.methods import FORMATS
from specjax.parallel import RULES

TABLES = {"embed_tokens.weight": "embedding", "lm_head.weight": "head"}
"""Tensors without which a drafter uses those of its target."""

_NAMED = re.compile(r"([\w.]+) (?:is missing|is not a tensor)|lacks ([\w.]+)$", re.MULTILINE)


def check_removals(folder: pathlib.Path, target: LanguageModel) -> int:
    """Remove each tensor of a folder by itself, and return how many there are.

    Nothing is written: what was read of the headers loses an entry.
    """
    format, config, tensors = open_drafter(folder)
    whole = FORMATS[format].read(folder, config, tensors, target, RULES)
    for name in tensors:
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        found = recognised(folder, config, rest)
        assert found == format, f"without {name} it is taken for {found}"
        reduced = "to_draft" in whole.params
        optional = {"embed_tokens.weight", "t2d"} | (
            set() if reduced else {"lm_head.weight", "d2t"}
        )
        if name in optional:
            read = FORMATS[format].read(folder, config, rest, target, RULES)
            assert read.source == whole.source
            assert name not in TABLES or TABLES[name] in read.shares
            continue
        with pytest.raises(ValueError) as caught:
            FORMATS[format].read(folder, config, rest, target, RULES)
        named = {one or other for one, other in _NAMED.findall(str(caught.value))}
        assert named == {name}, f"without {name}: {caught.value}"
        assert str(folder) in str(caught.value)
        with pytest.raises(ValueError, match=re.escape(name)):
            FORMATS[format].describe(config, rest, target)
    return len(tensors)
