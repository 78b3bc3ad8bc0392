"""Sources predict the next tokens, and a shape of `specjax.proposers` arranges the drafts."""

from specjax.proposers.sources.block_draft import BlockDraftSource
from specjax.proposers.sources.catch_up import AT_ONCE
from specjax.proposers.sources.datastore import DatastoreSource
from specjax.proposers.sources.draft import DraftSource, DraftState
from specjax.proposers.sources.eagle3 import Eagle3Source, Eagle3State
from specjax.proposers.sources.early_exit import EarlyExitSource
from specjax.proposers.sources.lookup import DEPTH, DatastoreParams, look_up
from specjax.proposers.sources.medusa import MedusaParams, MedusaSource
from specjax.proposers.sources.peagle import PEagleSource
from specjax.proposers.sources.translated import TranslatedParams, TranslatedSource

__all__ = [
    "AT_ONCE",
    "DEPTH",
    "BlockDraftSource",
    "DatastoreParams",
    "DatastoreSource",
    "DraftSource",
    "DraftState",
    "Eagle3Source",
    "Eagle3State",
    "EarlyExitSource",
    "MedusaParams",
    "MedusaSource",
    "PEagleSource",
    "TranslatedParams",
    "TranslatedSource",
    "look_up",
]
