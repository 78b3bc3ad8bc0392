"""Draft models: sources with the target's tokens or with others, and their drafters."""

from specjax.methods.draft_model.drafter import make_drafter, with_draft
from specjax.methods.draft_model.source import DraftModel, DraftSource, DraftTree
from specjax.methods.draft_model.translated import (
    TranslatedParams,
    TranslatedSource,
    Universal,
    UniversalParams,
)

__all__ = [
    "DraftModel",
    "DraftSource",
    "DraftTree",
    "TranslatedParams",
    "TranslatedSource",
    "Universal",
    "UniversalParams",
    "make_drafter",
    "with_draft",
]
