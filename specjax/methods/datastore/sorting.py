"""Sorts the positions of a corpus by the tokens before them, read backwards."""

from __future__ import annotations

import numpy as np

from specjax._internal.checks import within
from specjax.methods.datastore.lookup import DEPTH

SEPARATORS = {np.dtype(np.uint16): 2**16 - 1, np.dtype(np.uint32): 2**31 - 1}
"""The token id between texts, by dtype; it is greater than every token."""


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the dtype of a datastore's tokens.  2^16 - 1 is the separator, so it is not a token.

    Raises:
      ValueError: tokens that do not fit into int32.
    """
    within("vocab_size", vocab_size, 1, 2**31 - 2)
    return np.dtype(np.uint16 if vocab_size < 2**16 else np.uint32)


def bytes_to_build(vocab_size: int) -> int:
    """Returns the greatest memory of `sort_places`, in bytes a token."""
    dtype = token_dtype(vocab_size)
    return dtype.itemsize * (DEPTH + 1) + 24


def sort_places(tokens: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorts the positions of a corpus by their contexts.

    Args:
      tokens: [DEPTH + T] of the type `token_dtype(vocab_size)`; the first DEPTH are separators.
      vocab_size: V.

    Returns:
      The positions [P] int32, from 0 among the T, each with a token at and before it.  And
        the number of positions [V + 1] int32 before those whose contexts end with each token.
    """
    separator = SEPARATORS[tokens.dtype]
    size = len(tokens) - DEPTH
    bits = np.uint64(8 * tokens.dtype.itemsize)
    together = 8 // tokens.dtype.itemsize
    keys = []
    for first in range(1, DEPTH + 1, together):
        key = np.zeros(size, np.uint64)
        for back in range(first, first + together):
            key = (key << bits) | tokens[DEPTH - back : DEPTH - back + size]
        keys.append(key)
    order = np.lexsort(keys[::-1])
    del keys
    before = tokens[DEPTH - 1 : -1][order]
    is_place = (before != separator) & (tokens[DEPTH:][order] != separator)
    starts = np.searchsorted(before[is_place], np.arange(vocab_size + 1, dtype=np.int64))
    return order[is_place].astype(np.int32), starts.astype(np.int32)
