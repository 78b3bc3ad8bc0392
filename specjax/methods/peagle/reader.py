"""Reads P-EAGLE heads, in the layouts of speculators and SpecForge.

The tensors are those of an EAGLE-3 head, and `mask_hidden` [1, 1, n E]: learned hidden states in
place of the target's, for a token that is not known yet.
"""

from __future__ import annotations

import dataclasses
import pathlib

from specjax._internal.fields import Kind, check, count
from specjax.files import CONFIG, named
from specjax.methods.drafter import Drafter
from specjax.methods.eagle3 import (
    Parts,
    details_of,
    is_parallel,
    mask_row,
    own_table,
    packaging_of,
    proposal_depth,
    read_parts,
    without_copies,
)
from specjax.methods.peagle.source import PEagleSource
from specjax.methods.peagle.writer import PEAGLE_LAYOUTS
from specjax.methods.published import (
    Description,
    Format,
    Table,
    Tensors,
    folder_of,
    is_over,
    read_drafter,
    reads_pairs,
)
from specjax.models import Config, LanguageModel
from specjax.parallel import Rules
from specjax.proposers import ChoiceTree

_DEPTH = 8
"""The depth, in drafts, that both projects train by default."""

_MASK = "mask_hidden"


_NO_OUTPUT = Kind("missing, since a P-EAGLE head feeds nothing back", lambda value: not value)


def _mask_token(vocab_size: int) -> Kind:
    return Kind(
        f"the id of the token that stands for a missing one, in [0, {vocab_size - 1}]: add it to "
        "config.json (SpecForge has it among the options of the training run)",
        count(0, vocab_size - 1).accepts,
    )


def _matches(config: Config, tensors: Tensors) -> bool:
    return reads_pairs(tensors) and is_parallel(config, tensors)


def _read(
    folder: pathlib.Path, config: Config, tensors: Tensors, target: LanguageModel, rules: Rules
) -> Drafter:
    size = target.model.vocab_size
    with named(folder / CONFIG):
        kinds = {"norm_output": _NO_OUTPUT, "mask_token_id": _mask_token(size)}
        check({"norm_output": None} | config, kinds, optional=False)
    parts = without_copies(folder, read_parts(folder, config, tensors, target), tensors, target)
    assert parts.taps is not None  # the target is known
    source = PEagleSource(
        parts.network, size, config["mask_token_id"], proposal_depth(config) or _DEPTH, parts.taps
    )
    table = _table(folder, parts, tensors, target)
    return read_drafter(folder, ChoiceTree(source), source, table, target, rules, parts.shares)


def _table(folder: pathlib.Path, parts: Parts, tensors: Tensors, target: LanguageModel) -> Table:
    wide, row = (parts.network.num_taps * parts.network.target_size,), mask_row(parts.network)
    if _MASK in tensors and tensors[_MASK].shape == wide:
        row = dataclasses.replace(row, shape=wide)
    return own_table(folder, parts, tensors, target, (row,), {row.path: wide})


def _describe(config: Config, tensors: Tensors, target: LanguageModel | None) -> Description:
    folder = folder_of(tensors)
    parts = read_parts(folder, config, tensors, target)
    if target is not None:
        _table(folder, parts, tensors, target).check(folder)
    return Description(
        method="P-EAGLE",
        packaging=packaging_of(config),
        taps=parts.taps,
        num_drafts=proposal_depth(config) or _DEPTH,
        shares=parts.shares,
        details=(
            *details_of(config, parts, tensors),
            f"all drafts in one pass, mask token {config.get('mask_token_id')}",
        ),
    )


PEAGLE = Format(_matches, _read, _describe, is_over(PEagleSource), PEAGLE_LAYOUTS)
