"""Networks of published drafters, which read hidden states of a target."""

from specjax.models.drafts.block import (
    BlockDraft,
    BlockDraftConfig,
    block_axes,
    initial_block,
    read_block,
    stage_context,
)
from specjax.models.drafts.correction import Correction, Slot
from specjax.models.drafts.eagle3 import (
    Eagle3,
    Eagle3Config,
    draft_logits,
    eagle3_axes,
    eagle3_shapes,
)
from specjax.models.drafts.markov import MarkovHead
from specjax.models.drafts.prefix_gru import PrefixGRU
from specjax.models.drafts.selector import CandidateSelector
from specjax.models.drafts.shared import SharedParams, by_row, embedding_of, head_of
from specjax.models.drafts.vocabulary import on_target

__all__ = [
    "BlockDraft",
    "BlockDraftConfig",
    "CandidateSelector",
    "Correction",
    "Eagle3",
    "Eagle3Config",
    "MarkovHead",
    "PrefixGRU",
    "SharedParams",
    "Slot",
    "block_axes",
    "by_row",
    "draft_logits",
    "eagle3_axes",
    "eagle3_shapes",
    "embedding_of",
    "head_of",
    "initial_block",
    "on_target",
    "read_block",
    "stage_context",
]
