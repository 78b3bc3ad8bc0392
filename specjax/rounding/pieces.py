"""Cuts texts into pieces of one length, which a model reads in batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specjax._internal.checks import shown
from specjax.models import LanguageModel

LEAST = 64
"""The fewest tokens of all texts together."""


def pieces_of(
    name: str, texts: Sequence[str], model: LanguageModel, count: int, length: int
) -> np.ndarray:
    """Returns [P, L] int32: at most `count` pieces of at most `length` tokens of the texts.

    The texts are joined, and the pieces lie evenly in them.

    Args:
      name: of the argument or option with the texts, for messages.
      texts: of any lengths.
      model: its tokenizer reads them.
      count: of pieces.
      length: of a piece; at most the positions of the model.

    Raises:
      ValueError: the model has no tokenizer, or the texts are too short.
    """
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name} holds {shown(texts)}; pass a list of texts")
    if model.tokenizer is None:
        raise ValueError(f"{name} is text, and {model.name} has no tokenizer to read it")
    ids = [token for text in texts for token in model.tokenizer.encode(text).ids]
    if len(ids) < LEAST:
        raise ValueError(f"{name} holds {len(ids)} tokens, and at least {LEAST} are needed")
    length = min(length, model.model.max_positions, len(ids))
    many = len(ids) // length
    chosen = np.linspace(0, many - 1, min(count, many)).astype(int)
    return np.array(ids[: many * length], np.int32).reshape(many, length)[chosen]
