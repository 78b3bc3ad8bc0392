"""What is learned and what is not, in colour: `--show-mask`."""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np
import tokenizers

_PADDING = 4  # of one token at the end are not text
_LEARNED, _READ, _PLAIN = "\x1b[1;32m", "\x1b[2m", "\x1b[0m"


def paint(ids: Any, learned: Any, tokenizer: tokenizers.Tokenizer) -> str:
    """The text of token ids [L], those with `learned` [L] bold and green, the others dim; a line of counts before it.

    Where the environment has NO_COLOR (no-color.org), ⟦ ⟧ stand around what is learned.
    """
    ids, learned = np.asarray(ids), np.asarray(learned, bool)
    marks = ("", "", "⟦", "⟧") if os.environ.get("NO_COLOR") else (_READ, _PLAIN, _LEARNED, _PLAIN)
    parts, size = [], len(ids)
    while size > 1 and ids[size - 1] == ids[-1] and not learned[size - 1]:
        size -= 1  # what pads a sequence is said once
    padding = len(ids) - size
    if padding < _PADDING:
        size, padding = len(ids), 0
    for kept, run in itertools.groupby(
        zip(learned[:size].tolist(), ids[:size].tolist(), strict=True), key=lambda pair: pair[0]
    ):
        text = tokenizer.decode([token for _, token in run], skip_special_tokens=False)
        # A text may hold escapes of its own; a terminal is not to obey them.
        text = "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
        parts.append(marks[2 * kept] + text + marks[2 * kept + 1])
    return (
        f"--- {int(learned.sum())} of {len(ids)} tokens are learned\n"
        + "".join(parts)
        + f"\n({padding} tokens of padding)" * (padding > 0)
    )
