"""The tokens that a drafter knows, and the id that it reads in place of future tokens."""

from __future__ import annotations

import numpy as np

from specjax.models import LanguageModel

_PLACEHOLDERS = ("[PAD]", "<pad>", "<|pad|>", "<|mask|>", "[MASK]", "<mask>", "<|endoftext|>")


def draft_vocabulary(counts: np.ndarray, size: int, needed: tuple[int, ...]) -> np.ndarray:
    """Returns the most frequent tokens of the data: [U] int32 ids of the target, ascending.

    Args:
      counts: [V] of each token in the data.
      size: U.
      needed: ids that are always taken, such as the EOS tokens.
    """
    if not len(needed) <= size <= len(counts):
        raise ValueError(
            f"--draft-vocab-size is {size}; it must lie in [{max(1, len(needed))}, {len(counts)}], "
            "the size of the target's vocabulary"
        )
    counts = counts.copy()
    counts[list(needed)] = counts.max() + 1
    # A stable order, so that equal counts give the same vocabulary on every machine.
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def mask_token(target: LanguageModel, asked: int | None) -> int:
    """Returns the id in place of a token that is not known yet: `asked`, or one of the target's."""
    if asked is not None:
        return asked
    assert target.tokenizer is not None  # `gather` has checked it
    ids = (target.tokenizer.token_to_id(name) for name in _PLACEHOLDERS)
    found = [*(number for number in ids if number is not None), *target.eos]
    if not found:
        raise ValueError(
            "the target's tokenizer has no padding, mask or EOS token: name an id that its texts "
            "rarely hold, with --mask-token"
        )
    return found[0]
