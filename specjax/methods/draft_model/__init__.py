"""Draft models: sources with the target's tokens or with others, and their drafters."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.methods.draft_model.drafter import make_drafter, with_draft
    from specjax.methods.draft_model.source import DraftModel, DraftSource, DraftTree, read_staged
    from specjax.methods.draft_model.translated import (
        TranslatedParams,
        TranslatedSource,
        Universal,
        UniversalParams,
    )
    from specjax.methods.draft_model.trimmed import trim_vocabulary
    from specjax.methods.draft_model.windowed import window_draft

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "DraftModel",
    "DraftSource",
    "DraftTree",
    "TranslatedParams",
    "TranslatedSource",
    "Universal",
    "UniversalParams",
    "make_drafter",
    "read_staged",
    "trim_vocabulary",
    "window_draft",
    "with_draft",
]
