"""Colours a text by the tokens that were accepted drafts."""

from __future__ import annotations

import jax
import numpy as np

from specjax.generation import Prepared, warm_up
from specjax.parallel import to_host

_SHADES = ("", "\033[32m", "\033[36m", "\033[34m", "\033[35m")
"""The colours by the depth of the draft: green, cyan, blue, magenta; 0 is the target's token."""

_END = "\033[0m"

LEGEND = (
    f"{_SHADES[1]}first draft{_END}, {_SHADES[2]}second{_END}, {_SHADES[3]}third{_END}, "
    f"{_SHADES[4]}a later one{_END} of a step, all accepted; not coloured: chosen by the target"
)


def depths_of(prepared: Prepared) -> list[list[int]]:
    """How deep each new token was drafted, from 1; 0 for tokens that the target chose itself.

    This decodes once more, one step at a time, because a whole run does not keep its steps.
    """
    ready = warm_up(prepared)
    state = ready.prefill()
    rows = len(prepared.lengths)
    depths: list[list[int]] = [[] for _ in range(rows)]
    before, accepted = prepared.lengths, np.zeros(rows, int)
    while not to_host(state.done)[:rows].all():
        state = jax.block_until_ready(ready.runner.run(ready.params, state, 1))
        after, now = to_host((state.length, state.stats.accepted))
        for row in range(rows):
            new, drafts = int(after[row] - before[row]), int(now[row] - accepted[row])
            # A row that ends within accepted drafts has no token of the target after them.
            depths[row] += [depth if depth <= drafts else 0 for depth in range(1, new + 1)]
        before, accepted = after, now
    return depths


def painted(prepared: Prepared, row: int, tokens: list[int], depths: list[int]) -> str:
    """The text of new tokens in the colours of their depths.

    A character that several tokens spell has the colour of the last of them.
    """
    parts = []
    pieces = prepared.texts.pieces(row, tokens, prepared.texts.cut(row, tokens)[1])
    for piece, depth in zip(pieces, depths, strict=False):
        shade = _SHADES[min(depth, len(_SHADES) - 1)]
        # Each line by itself, so that a pager that shows single lines keeps the colours.
        parts += [f"{shade}{line}{_END}" if shade and line else line
                  for line in piece.splitlines(keepends=True)]  # fmt: skip
    return "".join(parts)
