"""DSpark, in the layouts of DeepSpec, SpecForge and speculators."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from specjax.methods.block.config import Fields
from specjax.methods.block.correction import Correction
from specjax.methods.block.markov import MarkovHead
from specjax.methods.block.network import BlockDraftConfig
from specjax.methods.block.reader import (
    Method,
    describe_block_draft,
    is_block_draft,
    labels_of,
    read_block_draft,
    renamed,
)
from specjax.methods.block.source import BlockDraftSource
from specjax.methods.block.writer import flat_layout, makes, nested_layout, speculators_layout
from specjax.methods.published import Description, Format, Tensors, dense_rows
from specjax.models import Config, LanguageModel, Tensor

_MARKOV, _CONFIDENCE = "markov_head", "confidence_head.proj"
_CLASS = "DSparkDraftModel"


def _matches(config: Config, tensors: Tensors) -> bool:
    """Recognises DSpark by its heads; without any, only the configuration tells it from DFlash."""
    heads = _has(renamed(tensors), _MARKOV) or _has(renamed(tensors), _CONFIDENCE)
    return is_block_draft(tensors) and (heads or "dspark" in labels_of(config))


def _has(names: Iterable[str], head: str) -> bool:
    """Returns whether there is a tensor of a head."""
    return any(name.startswith(f"{head}.") for name in names)


def _markov(
    fields: Fields, names: set[str], block: BlockDraftConfig, vocab_size: int, units: int
) -> Correction | None:
    rank = fields.count("markov_rank", 256) if _has(names, _MARKOV) else 0
    confidence = None
    if _has(names, _CONFIDENCE):
        # SpecForge leaves the field out for heads that read only the hidden state.
        both = fields.flag("confidence_head_with_markov", not fields.nested and rank > 0)
        confidence = "both" if both else "hidden"
    if rank == 0 and confidence is None:
        return None
    # By the tensors; the field only names kinds that have the same ones.
    kind = str(fields.get("markov_head_type", "vanilla")).lower()
    for name, part in (("gated", "gate_proj"), ("rnn", "joint_proj")):
        if _has(names, f"{_MARKOV}.{part}") != (kind == name) and rank > 0:
            raise ValueError(
                f"markov_head_type is {kind!r}, and the file "
                f"{'lacks' if kind == name else 'holds'} {_MARKOV}.{part}.weight"
            )
    size = block.layers.hidden_size
    return MarkovHead(size, vocab_size, units, rank, kind, confidence)


def _markov_rows(correction: Correction) -> list[Tensor]:
    names = {
        ("before",): f"{_MARKOV}.markov_w1.weight",
        ("after",): f"{_MARKOV}.markov_w2.weight",
    }
    parts = {
        "gate": f"{_MARKOV}.gate_proj",
        "joint": f"{_MARKOV}.joint_proj",
        "confidence": _CONFIDENCE,
    }
    rows = [
        Tensor(name, ("correction", *path), transpose=path == ("after",))
        for path, name in names.items()
        if path in correction.shapes()
    ]
    for part, name in parts.items():
        if (part, "kernel") in correction.shapes():
            rows += dense_rows(name, ("correction", part), bias=True)
    return rows


def _describe(config: Config, tensors: Tensors, target: LanguageModel | None) -> Description:
    description = describe_block_draft(config, tensors, target, "DSpark", METHOD)
    names = renamed(tensors)
    heads = [
        words
        for words, head in (("a Markov head", _MARKOV), ("a confidence head", _CONFIDENCE))
        if _has(names, head)
    ]
    return dataclasses.replace(
        description, details=(*description.details, *(f"with {words}" for words in heads))
    )


def _fields(source: BlockDraftSource) -> Config:
    """Returns the fields of the heads."""
    head = source.correction
    assert isinstance(head, MarkovHead)  # `Format.makes`
    return {
        "markov_rank": head.rank,
        "markov_head_type": head.kind,
        "enable_confidence_head": head.confidence_head is not None,
        "confidence_head_with_markov": head.confidence_head == "both",
    }


def _nested_fields(source: BlockDraftSource) -> Config:
    layers = source.net.config.layers
    # SpecForge wants to be told that each head has keys of its own.
    mode = "mha" if layers.num_heads == layers.num_kv_heads else "gqa"
    return {"projector_type": METHOD.name, "attention_mode": mode, **_fields(source)}


# DSpark is trained so that slot 0 predicts the token after the anchor.
METHOD = Method("dspark", lambda config: 0, _markov, _markov_rows)
_LAYOUTS = {
    "deepspec": flat_layout(METHOD, "Qwen3DSparkModel", _fields),
    "specforge": nested_layout(METHOD, lambda source: _CLASS, _nested_fields, plain=True),
    "speculators": speculators_layout(METHOD, lambda source: (METHOD.name, _CLASS), _fields),
}
DSPARK = Format(
    _matches,
    functools.partial(read_block_draft, method=METHOD),
    _describe,
    makes(MarkovHead),
    _LAYOUTS,
)
