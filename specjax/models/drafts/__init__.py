"""Networks of published drafters, which read hidden states of a target."""

from specjax.models.drafts.shared import SharedParams, embedding_of, head_of

__all__ = [
    "SharedParams",
    "embedding_of",
    "head_of",
]
