"""Reads and writes reduced vocabularies: the tokens of the target that a drafter can propose."""

from __future__ import annotations

import pathlib

import jax
import numpy as np

from specjax.files import WHOLE, Stored
from specjax.methods.published.format import Tensors
from specjax.models import LanguageModel
from specjax.types import ABSENT


def read_vocabulary(
    folder: pathlib.Path, tensors: Tensors, target: LanguageModel
) -> np.ndarray | None:
    """Returns [V] int32, the drafter's token of each target token, or ABSENT; None: the same.

    `d2t` [Vd] holds offsets: the drafter's token i is the target's token i + d2t[i].

    `t2d` [V], which may be missing, says for each token of the target whether it is in the table.
    For a target without weights no table is read, and only whether the result is None is right.

    Raises:
      ValueError: an invalid table; the message names it.
    """
    vocab_size = target.model.vocab_size
    if without_weights(target):
        reduced = "d2t" in tensors and tensors["d2t"].shape != (vocab_size,)
        return np.full(vocab_size, ABSENT, np.int32) if reduced else None
    if "d2t" not in tensors:
        if "t2d" in tensors and not read_whole(folder, "t2d", tensors["t2d"]).all():
            raise ValueError(
                f"{folder}: d2t is missing, and t2d marks a part of the target's tokens: download "
                "the folder again"
            )
        return None
    offsets = read_whole(folder, "d2t", tensors["d2t"]).astype(np.int64)
    ids = np.arange(len(offsets)) + offsets
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if wrong.size:
        raise ValueError(
            f"{folder}: d2t maps the draft token {wrong[0]} to {ids[wrong[0]]}, and the target has "
            f"the tokens 0 to {vocab_size - 1}; d2t holds offsets, target token = draft token + "
            "d2t: pass the target that the drafter was trained for"
        )
    if len(np.unique(ids)) < len(ids):
        raise ValueError(
            f"{folder}: d2t maps two draft tokens to the same target token; it holds offsets, "
            "target token = draft token + d2t"
        )
    if len(ids) == vocab_size and not offsets.any():
        return None
    if "t2d" in tensors:
        kept = read_whole(folder, "t2d", tensors["t2d"]).astype(bool)
        if len(kept) <= ids.max() or kept.sum() != len(ids) or not kept[ids].all():
            raise ValueError(
                f"{folder}: d2t names {len(ids)} target tokens, and t2d marks {kept.sum()} others: "
                "one of the tables is of another drafter"
            )
    table = np.full(vocab_size, ABSENT, np.int32)
    table[ids] = np.arange(len(ids))
    return table


def without_weights(target: LanguageModel) -> bool:
    """Returns whether a target is described only by the shapes of its parameters."""
    return isinstance(target.params["embedding"], jax.ShapeDtypeStruct)


def write_vocabulary(to_draft: np.ndarray | None, rows: int, units: int) -> dict[str, np.ndarray]:
    """Returns the tables `d2t` [units] int64 and `t2d` [rows] bool of a head and an embedding.

    `to_draft` is what `read_vocabulary` returns.

    Raises:
      ValueError: `to_draft` does not name each row of the head once.
    """
    if to_draft is None:
        return {"d2t": np.zeros(units, np.int64), "t2d": np.ones(rows, bool)}
    tokens = np.flatnonzero(to_draft >= 0)
    if not np.array_equal(np.sort(to_draft[tokens]), np.arange(units)):
        raise ValueError(
            f"to_draft names {len(tokens)} tokens, and the head has {units} rows; it must name "
            f"each row from 0 to {units - 1} once"
        )
    ids = np.empty(units, np.int64)
    ids[to_draft[tokens]] = tokens
    return {"d2t": ids - np.arange(units), "t2d": np.isin(np.arange(rows), tokens)}


def check_rows(
    folder: pathlib.Path, name: str, rows: int, target: LanguageModel, vocab_size: int
) -> None:
    """Raises ValueError unless a table of `rows` tokens has all tokens of the target.

    Vocabularies may be padded to different sizes.
    """
    if rows == vocab_size:
        return
    used = used_tokens(target)
    if rows < used:
        reduced = ", or download d2t, without which its rows are the target's first tokens"
        raise ValueError(
            f"{folder}: {name} has rows for {rows} tokens, and {target.name} uses {used}: "
            "pass the target that the drafter was trained for"
            + (reduced if name == "lm_head.weight" else "")
        )


def used_tokens(target: LanguageModel) -> int:
    """Returns the tokens of a target; the other rows of its tables are padding."""
    words = target.tokenizer
    if words is None:
        return target.model.vocab_size
    return 1 + max(words.get_vocab().values(), default=0)


def read_whole(folder: pathlib.Path, name: str, stored: Stored) -> np.ndarray:
    """Returns a table of whole numbers or flags [N]."""
    if stored.kind not in WHOLE or len(stored.shape) != 1:
        raise ValueError(
            f"{folder}: {name} is a {stored.kind} of shape {list(stored.shape)}; it must be a "
            f"list of {', '.join(WHOLE)}"
        )
    return np.array(np.memmap(stored.file, WHOLE[stored.kind], "r", stored.start, stored.shape))
