"""Domino, in the layout of SpecForge."""

from __future__ import annotations

import functools

from specjax.methods.block.config import Fields
from specjax.methods.block.correction import Correction
from specjax.methods.block.network import BlockDraftConfig
from specjax.methods.block.prefix_gru import PrefixGRU
from specjax.methods.block.reader import (
    Method,
    describe_block_draft,
    is_block_draft,
    read_block_draft,
    renamed,
)
from specjax.methods.block.source import BlockDraftSource
from specjax.methods.block.writer import makes, nested_layout
from specjax.methods.published import Format, Tensors
from specjax.models import Config, Tensor

_TENSORS = {
    "prefix_gru.weight_ih_l0": "input",
    "prefix_gru.weight_hh_l0": "state",
    "embed_proj.0.weight": "inner",
    "embed_proj.2.weight": "output",
}


def _matches(config: Config, tensors: Tensors) -> bool:
    return is_block_draft(tensors) and not renamed(tensors).keys().isdisjoint(_TENSORS)


def _gru(
    fields: Fields, names: set[str], block: BlockDraftConfig, vocab_size: int, units: int
) -> Correction:
    return PrefixGRU(
        block.layers.hidden_size,
        vocab_size,
        units,
        state_size=fields.count("gru_hidden_dim"),
        inner_size=fields.count("emb_dim"),
        uncorrected=fields.count("pure_draft_prefix_len", 0, least=0),
    )


def _rows(correction: Correction) -> list[Tensor]:
    return [Tensor(name, ("correction", part), transpose=True) for name, part in _TENSORS.items()]


def _fields(source: BlockDraftSource) -> Config:
    gru = source.correction
    assert isinstance(gru, PrefixGRU)  # `Format.makes`
    return {
        "projector_type": METHOD.name,
        "gru_hidden_dim": gru.state_size,
        "emb_dim": gru.inner_size,
        "pure_draft_prefix_len": gru.uncorrected,
        "shift_label": source.net.config.first_slot == 0,
    }


METHOD = Method(
    "domino",
    lambda config: 0 if Fields(config).flag("shift_label", False) else 1,
    _gru,
    _rows,
)
_LAYOUTS = {
    "specforge": nested_layout(METHOD, lambda source: "DominoDraftModel", _fields, plain=True)
}
DOMINO = Format(
    _matches,
    functools.partial(read_block_draft, method=METHOD),
    functools.partial(describe_block_draft, name="Domino", method=METHOD),
    makes(PrefixGRU),
    _LAYOUTS,
)
