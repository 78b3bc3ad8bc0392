"""The embedding, head and features that a drafter uses from its target without a copy."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import jax
from flax import struct
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from specjax.caches import BranchCache, KVCache
from specjax.models import Tables, head_matrix

_OwnT = TypeVar("_OwnT", bound=Tables, covariant=True)


@struct.dataclass
class SharedParams(Generic[_OwnT]):
    """The weights of a drafter, and those of its target that it uses."""

    own: _OwnT  # of the network; a drafter with a table or head of its own has them here
    # The target's "embedding" and "head", as far as the drafter uses them.
    target: Tables | dict[str, Any]


def embedding_of(params: SharedParams[Tables]) -> Array:
    """Returns the table [V, E] of embeddings: the drafter's own `embedding`, or the target's."""
    tables = params.own if "embedding" in params.own else params.target
    assert "embedding" in tables
    return tables["embedding"]


def head_of(params: SharedParams[Tables]) -> Array:
    """Returns the output matrix [E, V]: the drafter's own `head`, or the target's."""
    return head_matrix(params.own if "head" in params.own else params.target)


def by_row(features: Array, cache: KVCache | BranchCache) -> Array:
    """Returns `features` [B, T, F] split only by row, if `cache` is on a mesh.

    The matrix that reads them is split by F.  XLA would split the features likewise, and with them
    the target's hidden states, which every norm of the target needs unsplit.
    """
    if cache.sharding is None:
        return features
    rows = PartitionSpec(*cache.sharding.spec[:1])
    return jax.lax.with_sharding_constraint(features, NamedSharding(cache.sharding.mesh, rows))
