"""Shows which tokens of a batch are learned, in colour: `--show-mask`."""

from __future__ import annotations

import itertools
import os

import numpy as np
import tokenizers

_PADDING = 4  # this many equal tokens at the end of a sequence are padding
_LEARNED, _READ, _PLAIN = "\x1b[1;32m", "\x1b[2m", "\x1b[0m"


def paint(ids: np.ndarray, learned: np.ndarray, tokenizer: tokenizers.Tokenizer) -> str:
    """Colours the text of token ids [L]: tokens in the mask `learned` [L] are green, others dim.

    A line of counts comes first.  If the environment has NO_COLOR (no-color.org), ⟦ ⟧ enclose the
    learned tokens instead.
    """
    ids, learned = np.asarray(ids), np.asarray(learned, bool)
    marks = ("", "", "⟦", "⟧") if os.environ.get("NO_COLOR") else (_READ, _PLAIN, _LEARNED, _PLAIN)
    parts, size = [], len(ids)
    while size > 1 and ids[size - 1] == ids[-1] and not learned[size - 1]:
        size -= 1
    padding = len(ids) - size
    if padding < _PADDING:
        size, padding = len(ids), 0
    for is_learned, run in itertools.groupby(
        zip(learned[:size].tolist(), ids[:size].tolist(), strict=True), key=lambda pair: pair[0]
    ):
        text = tokenizer.decode([token for _, token in run], skip_special_tokens=False)
        # The text may contain terminal escape sequences, which must not reach the terminal.
        text = "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
        parts.append(marks[2 * is_learned] + text + marks[2 * is_learned + 1])
    return (
        f"--- {int(learned.sum())} of {len(ids)} tokens are learned\n"
        + "".join(parts)
        + f"\n({padding} tokens of padding)" * (padding > 0)
    )
