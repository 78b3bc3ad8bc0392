"""A draft model: its source, with its own or other tokens than the target's, and its drafter."""

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
