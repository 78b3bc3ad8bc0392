"""Short forms of the shapes and sources that are used most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from specjax._internal.checks import counts, items, shown
from specjax.contract import Model
from specjax.models import MedusaHeads
from specjax.proposers.shapes import Chain, Choices, ChoiceTree, StaticTree
from specjax.proposers.sources import DraftSource, EarlyExitSource, MedusaSource, TranslatedSource


def DraftModel(
    model: Model, vocab_size: int, num_drafts: int = 4, confidence_threshold: float = 0.0
) -> Chain:
    """A chain from a smaller model: `Chain(DraftSource(model, vocab_size), ...)`."""
    return Chain(DraftSource(model, vocab_size), num_drafts, confidence_threshold)


def DraftTree(model: Model, vocab_size: int, branching: Sequence[int] = (3, 2, 1)) -> StaticTree:
    """A static tree from a smaller model: `StaticTree(DraftSource(model, vocab_size), ...)`."""
    return StaticTree(DraftSource(model, vocab_size), cast(tuple[int, ...], branching))


def EarlyExit(
    target: Model, exit_layer: int, num_drafts: int = 4, confidence_threshold: float = 0.0
) -> Chain:
    """A chain from the target's first layers: `Chain(EarlyExitSource(target, exit_layer), ...)`."""
    return Chain(EarlyExitSource(target, exit_layer), num_drafts, confidence_threshold)


def Universal(
    model: Model,
    vocab_size: int,
    num_drafts: int = 4,
    expansion: int = 2,
    confidence_threshold: float = 0.0,
) -> Chain:
    """A chain from a model with another tokenizer: `Chain(TranslatedSource(...), ...)`."""
    return Chain(TranslatedSource(model, vocab_size, expansion), num_drafts, confidence_threshold)


def Medusa(heads: MedusaHeads, choices: Choices | Sequence[Sequence[int]] = ()) -> ChoiceTree:
    """A tree of choices from Medusa heads: `ChoiceTree(MedusaSource(heads), choices)`."""
    if not isinstance(heads, MedusaHeads):
        raise ValueError(f"heads={shown(heads)}; pass specjax.models.MedusaHeads")
    paths = [None] if items(choices) is None else list(map(items, items(choices) or ()))
    for path in paths:
        if path is None:
            raise ValueError(
                f"choices={shown(choices)}; pass a list of paths, as [[0], [1], [0, 0]]"
            )
        for rank in path:
            counts(choices=rank)
    return ChoiceTree(MedusaSource(heads), tuple(tuple(path or ()) for path in paths))
