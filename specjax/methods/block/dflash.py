"""DFlash, DFlash-2 and JetSpec, in the layouts of z-lab, SpecForge and speculators."""

from __future__ import annotations

import pathlib

from specjax.methods.block.config import Fields
from specjax.methods.block.correction import Correction
from specjax.methods.block.network import BlockDraftConfig
from specjax.methods.block.reader import (
    Method,
    describe_block_draft,
    is_block_draft,
    read_block_draft,
)
from specjax.methods.block.selector import CandidateSelector
from specjax.methods.block.source import BlockDraftSource
from specjax.methods.block.writer import makes, nested_layout, speculators_layout
from specjax.methods.drafter import Drafter
from specjax.methods.published import Description, Format, Tensors
from specjax.models import Config, LanguageModel, Tensor
from specjax.parallel import Rules

_SELECTOR = "candidate_selector"


def _read(
    folder: pathlib.Path, config: Config, tensors: Tensors, target: LanguageModel, rules: Rules
) -> Drafter:
    # Some files name the codebooks like embeddings.
    tensors = {
        name.removesuffix(".weight") if name.endswith("_codebook.weight") else name: tensor
        for name, tensor in tensors.items()
    }
    return read_block_draft(folder, config, tensors, target, rules, METHOD)


def _selector(
    fields: Fields, names: set[str], block: BlockDraftConfig, vocab_size: int, units: int
) -> Correction | None:
    if not any(name.startswith(f"{_SELECTOR}.") for name in names):
        return None
    if units != vocab_size:
        raise ValueError("a candidate selector with a reduced vocabulary (d2t) is not defined")
    rank, top_k = fields.count("selector_rank", 256), fields.count("selector_top_k", 16)
    return CandidateSelector(block.layers.hidden_size, vocab_size, units, rank, top_k)


def _selector_rows(correction: Correction) -> list[Tensor]:
    projection = f"{_SELECTOR}.hidden_projection.weight"
    return [
        Tensor(projection, ("correction", "projection"), transpose=True),
        Tensor(f"{_SELECTOR}.predecessor_codebook", ("correction", "predecessor")),
        Tensor(f"{_SELECTOR}.successor_codebook", ("correction", "successor")),
    ]


def _describe(config: Config, tensors: Tensors, target: LanguageModel | None) -> Description:
    name = "DFlash-2" if any(tensor.startswith(_SELECTOR) for tensor in tensors) else "DFlash"
    if Fields(config).flag("causal_head", False):
        name = "JetSpec"
    return describe_block_draft(config, tensors, target, name, METHOD)


def _fields(source: BlockDraftSource) -> Config:
    """Returns the fields of DFlash-2."""
    selector, block = source.correction, source.net.config
    if not isinstance(selector, CandidateSelector):
        return {}
    return {
        "conv_kernel_size": block.conv_size,
        "conv_group_size": block.conv_group,
        "selector_rank": selector.rank,
        "selector_top_k": selector.top_k,
    }


def _nested_fields(source: BlockDraftSource) -> Config:
    size = {"block_size": source.net.config.block_size} if source.correction is not None else {}
    return {**size, **_fields(source)}


def _label(source: BlockDraftSource) -> tuple[str, str]:
    """Returns the name of speculators, and the class of both packages."""
    if source.correction is None:
        return "dflash", "DFlashDraftModel"
    return "dflash2", "DFlash2DraftModel"


METHOD = Method("dflash", lambda config: 1, _selector, _selector_rows)
_LAYOUTS = {
    "z-lab": nested_layout(METHOD, lambda source: _label(source)[1], _nested_fields, plain=False),
    "speculators": speculators_layout(METHOD, _label, _fields),
}
DFLASH = Format(
    lambda config, tensors: is_block_draft(tensors),
    _read,
    _describe,
    makes(type(None), CandidateSelector),
    _LAYOUTS,
)
