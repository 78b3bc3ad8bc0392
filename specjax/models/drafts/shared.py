"""Parameters of a drafter: its own, and those of the target that it uses without a copy."""

from __future__ import annotations

from flax import struct
from jax import Array

from specjax.models.transformer import head_matrix
from specjax.types import Arrays


@struct.dataclass
class SharedParams:
    own: Arrays  # of the network; a drafter with a table or head of its own has them here
    # The target's "embedding" and "head", as far as the drafter uses them.
    target: dict[str, Arrays]


def embedding_of(params: SharedParams) -> Array:
    """The table [V, E] of token embeddings: the drafter's own `embedding`, or the target's."""
    return (params.own if "embedding" in params.own else params.target)["embedding"]


def head_of(params: SharedParams) -> Array:
    """The output matrix [E, V]: the drafter's own `head`, or the target's."""
    return head_matrix(params.own if "head" in params.own else params.target)
