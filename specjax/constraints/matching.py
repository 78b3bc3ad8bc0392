"""Matchers: constraints that no automaton can represent, one row at a time, on the host.

    text so far -> matcher at the root -> the drafts of a path, one by one -> and back again

A matcher is a stack: tokens are pushed and popped, and it returns which tokens may follow.  So one
walk over the tree of a proposal gives the mask of each node, and ends where it began.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np

from specjax._internal.bit_masks import FREE
from specjax.types import ABSENT


class Matcher(abc.ABC):
    """The text of one row, and the tokens that may follow it."""

    called: str
    """The constraint that it matches, for messages."""

    @abc.abstractmethod
    def allowed(self, words: np.ndarray) -> None:
        """Writes a mask of the tokens that may follow into `words` [W] uint32, one bit a token.

        The tokens that end a row are not part of the mask.
        """

    @abc.abstractmethod
    def is_complete(self) -> bool:
        """Returns whether the text may end here."""

    @abc.abstractmethod
    def push(self, token: int) -> bool:
        """Appends a token.  Returns False if it may not follow; the text then stays as it is."""

    @abc.abstractmethod
    def pop(self) -> None:
        """Removes the last token."""

    def fault(self) -> str | None:
        """Returns why the matcher gave up, such as a limit of its memory; None while it works."""
        return None


class Matchers:
    """The matchers of B rows; None for rows without a grammar.

    Args:
      rows: of each row, with the text of its output so far.
      ends: [B, ids] int32, the tokens that end each row, padded with ABSENT.
      words: W, of a mask.
    """

    def __init__(self, rows: Sequence[Matcher | None], ends: np.ndarray, words: int) -> None:
        self.rows, self.words = rows, words
        self.ends = [[token for token in row.tolist() if token != ABSENT] for row in ends]

    def roots(self, nodes: int, done: np.ndarray) -> np.ndarray:
        """Returns masks [B, N, W] uint32 with the masks of the roots; `tree` fills in the others.

        Raises:
          ValueError: nothing may follow the text of a row that is not done.
        """
        masks = np.full((len(self.rows), nodes, self.words), FREE)
        for row, matcher in enumerate(self.rows):
            if matcher is None or done[row]:
                continue
            if not self._mask(row, matcher, masks[row, 0]):
                raise ValueError(
                    f"nothing may follow the text of prompt {row} under {matcher.called}: "
                    f"{matcher.fault() or 'no token of the vocabulary writes what it needs'}; "
                    "correct the grammar"
                )
        return masks

    def tree(
        self, masks: np.ndarray, tokens: np.ndarray, parent: np.ndarray, done: np.ndarray
    ) -> np.ndarray:
        """Fills in the masks of the drafts `tokens` [B, N] of a `Proposal` with `parent` [B, N].

        A draft that may not follow its text is rejected by the mask of its parent, and so are its
        descendants.  The masks of such nodes allow everything.
        """
        for row, matcher in enumerate(self.rows):
            if matcher is None or done[row]:
                continue
            children: dict[int, list[int]] = {}
            for node, above in enumerate(parent[row].tolist()):
                if above != ABSENT:
                    children.setdefault(above, []).append(node)
            self._below(row, matcher, 0, children, tokens[row].tolist(), masks[row])
        return masks

    def _below(
        self,
        row: int,
        matcher: Matcher,
        node: int,
        children: dict[int, list[int]],
        tokens: list[int],
        masks: np.ndarray,
    ) -> None:
        for child in children.get(node, ()):
            token = tokens[child]
            if token in self.ends[row] or not matcher.push(token):
                continue
            if not self._mask(row, matcher, masks[child]):
                masks[child] = FREE  # the text ends in nothing there, and `observe` will say so
            self._below(row, matcher, child, children, tokens, masks)
            matcher.pop()

    def _mask(self, row: int, matcher: Matcher, words: np.ndarray) -> bool:
        """Writes the mask of a node.  Returns False if nothing may follow."""
        matcher.allowed(words)
        complete = matcher.is_complete()
        for token in self.ends[row]:
            bit = np.uint32(1 << (token % 32))
            words[token // 32] = words[token // 32] | bit if complete else words[token // 32] & ~bit
        return bool(words.any())

    def observe(self, emitted: np.ndarray, count: np.ndarray) -> None:
        """Advances the matchers by the first `count` [B] of the tokens `emitted` [B, T].

        Raises:
          ValueError: a matcher gave up inside the window.
        """
        for row, matcher in enumerate(self.rows):
            if matcher is None:
                continue
            for token in emitted[row, : count[row]].tolist():
                if token in self.ends[row]:
                    break
                if not matcher.push(token):
                    raise ValueError(
                        f"token {token} may not follow the text of prompt {row} under "
                        f"{matcher.called}: {matcher.fault() or 'it was drawn without a mask'}; "
                        "correct the grammar"
                    )
