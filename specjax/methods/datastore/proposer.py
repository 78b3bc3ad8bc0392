"""`DatastoreLookup`: drafts a chain or a small tree of continuations from a datastore."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from specjax.methods.datastore.source import DatastoreSource
from specjax.proposers import Chain, StaticTree


def DatastoreLookup(
    vocab_size: int,
    num_drafts: int = 4,
    branching: Sequence[int] | None = None,
    min_share: float = 0.0,
) -> Chain | StaticTree:
    """Returns a shape over a `DatastoreSource`.  `Datastore.drafter` adds the datastore.

    Args:
      vocab_size: the target's.
      num_drafts: the length of a chain.
      branching: children per node for each level of a tree; None: a chain.
      min_share: as in `DatastoreSource`.

    Example:
      >>> specjax.DatastoreLookup(vocab_size=512, num_drafts=4).max_depth
      4
    """
    source = DatastoreSource(vocab_size, min_share)
    if branching is None:
        return Chain(source, num_drafts)
    return StaticTree(source, cast(tuple[int, ...], branching))
