"""The tokens of a drafter with a reduced vocabulary: the most frequent ones of the data."""

from __future__ import annotations

import numpy as np

from specjax.training.material import Material


def draft_vocabulary(
    material: Material, size: int, vocab_size: int, needed: tuple[int, ...]
) -> np.ndarray:
    """[U] int32 ids of the target, ascending.

    Args:
      material: counted are the tokens of the text, and the learned ones of sequences.
      size: U.
      vocab_size: V of the target.
      needed: ids that are always taken, such as the EOS tokens.

    Raises:
      ValueError: a size above V, or below the number of needed ids.
    """
    if not len(needed) <= size <= vocab_size:
        raise ValueError(
            f"--draft-vocab-size is {size}; it must lie in [{max(1, len(needed))}, {vocab_size}], "
            "the size of the target's vocabulary"
        )
    counts = np.zeros(vocab_size, np.int64)
    if material.text is not None:
        counts += np.bincount(np.asarray(material.text.ids), minlength=vocab_size)[:vocab_size]
    if material.written is not None:
        tokens, drawn = material.written.tokens[:, 1:], material.written.drawn > 0
        counts += np.bincount(tokens[drawn], minlength=vocab_size)[:vocab_size]
    counts[list(needed)] = counts.max() + 1
    # A stable order, so that equal counts give the same vocabulary on every machine.
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)
