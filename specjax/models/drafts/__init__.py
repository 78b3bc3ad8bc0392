"""Networks of published drafters, which read hidden states of a target."""

from specjax.models.drafts.eagle3 import Eagle3, Eagle3Config, draft_logits, eagle3_shapes
from specjax.models.drafts.shared import SharedParams, embedding_of, head_of

__all__ = [
    "Eagle3",
    "Eagle3Config",
    "SharedParams",
    "draft_logits",
    "eagle3_shapes",
    "embedding_of",
    "head_of",
]
