"""Networks of published drafters, which read hidden states of a target."""

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
from specjax.models.drafts.shared import SharedParams, embedding_of, head_of

__all__ = [
    "BlockDraft",
    "BlockDraftConfig",
    "CandidateSelector",
    "Correction",
    "MarkovHead",
    "PrefixGRU",
    "SharedParams",
    "Slot",
    "embedding_of",
    "head_of",
    "initial_block",
    "read_block",
    "stage_context",
]
