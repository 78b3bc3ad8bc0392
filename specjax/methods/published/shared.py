"""The embedding and the head of a drafter: its own, or those of the target.

Some libraries read a drafter without its target, so their layouts repeat the target's tables.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from specjax.files import KINDS, Stored
from specjax.methods.published.drafter import PublishedDrafter
from specjax.methods.published.format import Export
from specjax.methods.published.layers import dense_rows
from specjax.methods.published.vocabulary import without_weights, write_vocabulary
from specjax.models import Int8, LanguageModel, Tensor, head_matrix
from specjax.parallel import to_host

EMBEDDING = Tensor("embed_tokens.weight", ("embedding",))
(HEAD,) = dense_rows("lm_head", ("head",))

TABLES = {"embedding": EMBEDDING, "head": HEAD}
_PIECE = 4096  # rows of a table that are compared at a time


def repeats(stored: Stored, part: str, target: LanguageModel) -> bool:
    """Returns whether a file holds the target's "embedding" or "head", in the dtype of the target.

    For a target without weights it is unknown, and the result is False.
    """
    if without_weights(target):
        return False
    whole = part == "head"
    table = head_matrix(target.params) if whole else target.params["embedding"]
    if isinstance(table, Int8) or stored.kind not in KINDS:
        return False
    if stored.shape != (table.shape[::-1] if whole else table.shape):
        return False
    table = table.T if whole else table
    for at in range(0, len(table), _PIECE):
        ours = to_host(table[at : at + _PIECE])
        if not np.array_equal(stored.map()[at : at + _PIECE].astype(ours.dtype), ours):
            return False
    return True


def is_reduced(drafter: PublishedDrafter) -> bool:
    """Returns whether the drafter can propose only some of the target's tokens."""
    return "to_draft" in drafter.params


def num_units(drafter: PublishedDrafter) -> int:
    """Returns the number of rows that its head has in a file."""
    if "head" in drafter.shares:
        return drafter.sizes[1]
    head = drafter.params["head"]
    return head["kernel"].shape[1] if "kernel" in head else head["weight"].shape[0]


def table_faults(drafter: PublishedDrafter) -> list[str]:
    """Lists the properties of a drafter's tables that no layout can hold, as in `Layout.faults`."""
    size, units, faults = drafter.sizes[1], num_units(drafter), []
    if "embedding" not in drafter.shares and len(drafter.params["embedding"]) != size:
        rows = len(drafter.params["embedding"])
        faults.append(f"has an embedding of {rows} rows, and the target has {size}")
    if is_reduced(drafter) != (units < size) or units > size:
        reduced = "has a reduced vocabulary" if is_reduced(drafter) else "has a whole vocabulary"
        faults.append(f"{reduced} and a head of {units} rows, and the target has {size}")
    return faults


def own_faults(drafter: PublishedDrafter) -> list[str]:
    """Lists the tables of a drafter that a layout without tables cannot hold."""
    words = {"embedding": "has an embedding of its own", "head": "has a head of its own"}
    return [words[part] for part in TABLES if part not in drafter.shares]


def with_tables(
    export: Export,
    drafter: PublishedDrafter,
    target: LanguageModel,
    size: int,
    *,
    repeats: tuple[str, ...] = (),
    maps: bool = False,
) -> Export:
    """Returns an export with the tables of its drafter.

    Args:
      export: without tables.
      drafter, target: as for `save_drafter`.
      size: the hidden size of the drafter.
      repeats: of "embedding" and "head", those of the target that the file repeats if the drafter
        has none of its own.
      maps: write `d2t` and `t2d` even if the vocabulary is not reduced.
    """
    rows, shapes, params = [*export.rows], {**export.shapes}, {**export.params}
    vocab_size, units, theirs = drafter.sizes[1], num_units(drafter), {}
    for part, row in TABLES.items():
        if part in drafter.shares and part not in repeats:
            continue
        if part in drafter.shares:
            tied = part not in target.params
            theirs[part] = target.params["embedding" if tied else part]
            # A tied head is the embedding, which lies as in a file.
            path = ("target", part) if tied else ("target", *row.path)
            row = dataclasses.replace(row, path=path, transpose=row.transpose and not tied)
        rows.append(row)
        shapes[row.path] = (size, units) if row.transpose else (vocab_size, size)
    tables: dict[str, np.ndarray] = {}
    if maps or is_reduced(drafter):
        known = to_host(drafter.params["to_draft"]) if is_reduced(drafter) else None
        tables = write_vocabulary(known, vocab_size, units)
    params["target"] = theirs
    return Export(export.config, rows, shapes, params, tables)
