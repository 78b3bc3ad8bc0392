"""Folders with one tensor `map.weight` [D, E, E]."""

from __future__ import annotations

import pathlib
from typing import Any

from specjax.methods import Description, Drafter, Format, sizes_of
from specjax.methods.published import Table, is_over, read_drafter
from specjax.models import LanguageModel, Tensor
from specjax.proposers import ChoiceTree
from toy_method.source import MapSource

_ROW = Tensor("map.weight", ("map",))


def _read(
    folder: pathlib.Path, config: Any, tensors: Any, target: LanguageModel, rules: Any
) -> Drafter:
    depth = config["num_drafts"]
    size, vocab, _ = sizes_of(target, folder.name)
    source = MapSource(target.model.module.config, vocab, depth)
    table = Table([_ROW], {("map",): (depth, size, size)}, tensors, None)
    shares = ("embedding", "head")
    return read_drafter(folder, ChoiceTree(source), source, table, target, rules, shares)


def _describe(config: Any, tensors: Any, target: LanguageModel | None) -> Description:
    return Description("map", "the tests", (), config["num_drafts"], ("embedding", "head"))


MAP = Format(
    lambda config, tensors: set(tensors) == {_ROW.name}, _read, _describe, is_over(MapSource), {}
)
