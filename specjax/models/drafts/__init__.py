"""Networks of published drafters, one file each."""

from specjax.models.drafts.block import (
    BlockDraft,
    BlockDraftConfig,
    initial_block,
    read_block,
    stage_context,
)
from specjax.models.drafts.correction import Correction, Slot
from specjax.models.drafts.markov import MarkovHead
from specjax.models.drafts.prefix_gru import PrefixGRU
from specjax.models.drafts.selector import CandidateSelector

__all__ = [
    "BlockDraft",
    "BlockDraftConfig",
    "CandidateSelector",
    "Correction",
    "MarkovHead",
    "PrefixGRU",
    "Slot",
    "initial_block",
    "read_block",
    "stage_context",
]
