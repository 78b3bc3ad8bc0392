"""A context-free language over toy tokens: brackets of several kinds, and values in them."""

from __future__ import annotations

import numpy as np

from specjax.constraints import Matcher


def follows(
    output: list[int], vocab: int, close: dict[int, int], end: int
) -> tuple[set[int], bool]:
    """The tokens that may follow `output`, and whether it may end, by reading it from its start.

    A bracket opens anywhere.  A value stands first in a text and in each bracket, and its parity is
    that of the innermost bracket.

    Args:
      output: tokens.
      vocab: the number of tokens.
      close: the closing token of each opening one; these are the first tokens.
      end: a token that is never part of a text.
    """
    stack: list[int] = []
    for token in output:
        if token in close:
            stack.append(token)
        elif token in close.values():
            stack.pop()
    opened = not output or output[-1] in close
    may = set(close)
    if opened:
        values = range(2 * len(close), vocab)
        may |= {t for t in values if t != end and (not stack or t % 2 == stack[-1] % 2)}
    elif stack:
        may.add(close[stack[-1]])
    return may, bool(output) and not stack and not opened


class Nested(Matcher):
    """The matcher of that language."""

    called = "nested brackets"

    def __init__(self, vocab: int, close: dict[int, int], end: int) -> None:
        self.vocab, self.close, self.end = vocab, close, end
        self.output: list[int] = []

    def _follows(self) -> tuple[set[int], bool]:
        return follows(self.output, self.vocab, self.close, self.end)

    def allowed(self, words: np.ndarray) -> None:
        words[:] = 0
        for token in self._follows()[0]:
            words[token // 32] |= np.uint32(1 << token % 32)

    def is_complete(self) -> bool:
        return self._follows()[1]

    def push(self, token: int) -> bool:
        if token not in self._follows()[0]:
            return False
        self.output.append(token)
        return True

    def pop(self) -> None:
        self.output.pop()
