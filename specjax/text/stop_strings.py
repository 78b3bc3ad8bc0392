"""Decodes the text of a growing row: its final prefix, its stop strings, and its pieces."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from specjax.models import LanguageModel
from specjax.text.words import Words

_UNFINISHED = "\ufffd"
"""The character for bytes that are not a character, or that are the beginning of one."""


class Texts:
    """Decodes the rows of one batch.

    A text leaves special tokens out, unless `decode` is asked for them.
    """

    def __init__(self, target: LanguageModel, before: list[int], stops: tuple[str, ...]) -> None:
        self.target, self.stops = target, stops
        self.words = Words(target.tokenizer)
        self._before = before  # the last token of each prompt
        self._alone: dict[tuple[int, bool], str] = {}  # its text, by row and `special`

    def decode(self, row: int, tokens: Sequence[int], special: bool = False) -> str:
        """Returns the text of the new tokens, with `special` also that of special tokens.

        They are decoded together with the prompt's last token, since some tokens lose a leading
        space if they are decoded without it.
        """
        if self.target.tokenizer is None:
            return ""
        decode = functools.partial(self.target.tokenizer.decode, skip_special_tokens=not special)
        if (before := self._alone.get((row, special))) is None:
            before = self._alone[row, special] = decode([self._before[row]])
        together = decode([self._before[row], *tokens])
        return together[len(before) :] if together.startswith(before) else decode(list(tokens))

    def cut(self, row: int, tokens: list[int], known: int = 0) -> tuple[list[int], str, bool]:
        """Cuts the tokens and the text of a row at its first stop string.

        Args:
          row: its number.
          tokens: its new tokens.
          known: the text of this many first tokens has no stop string.  A growing row is searched
            only once if the caller keeps count, and cut at the same token whether the tokens come
            one by one or several at a time.

        Returns:
          The fewest first tokens whose text contains a stop string, the text before that string,
          and True.  Without a stop string: all tokens, their text and False.
        """
        text = self.decode(row, tokens)
        count = self._stopped_after(row, tokens, known, text) if self.stops else None
        if count is None:
            return tokens, text, False
        text = self.decode(row, tokens[:count])
        return tokens[:count], text[: min(at for at in map(text.find, self.stops) if at >= 0)], True

    def _stopped_after(self, row: int, tokens: list[int], known: int, text: str) -> int | None:
        """Returns the fewest first tokens, more than `known`, whose text contains a stop string."""
        # Later tokens can take back only characters that are unfinished, or written in bytes.
        changes = any(map(self.words.is_byte, tokens[known:]))
        if changes or any(_UNFINISHED in stop for stop in self.stops):
            counts = range(known + 1, len(tokens) + 1)
            return next((n for n in counts if self._has_stop(self.decode(row, tokens[:n]))), None)
        if not self._has_stop(text):
            return None
        low, high = known + 1, len(tokens)
        while low < high:
            middle = (low + high) // 2
            stopped = self._has_stop(self.decode(row, tokens[:middle]))
            low, high = (low, middle) if stopped else (middle + 1, high)
        return low

    def _has_stop(self, text: str) -> bool:
        return any(stop in text for stop in self.stops)

    def certain(self, row: int, tokens: list[int]) -> str:
        """Returns the prefix of the text of growing tokens that can no longer change.

        It ends before an incomplete character and before the beginning of a stop string.  It also
        ends before tokens of single bytes until another token follows: a decoder with byte fallback
        shows the bytes of a whole run as U+FFFD if they are not UTF-8 together.
        """
        return self._certain(row, tokens)[0]

    def _certain(self, row: int, tokens: list[int]) -> tuple[str, bool]:
        """Returns `certain`, and True if it is the text of all tokens."""
        count = len(tokens)
        while count and (
            self.words.is_byte(tokens[count - 1]) or self.words.is_special(tokens[count - 1])
        ):
            count -= 1
        text = self.decode(row, tokens[:count])
        known = text.rstrip(_UNFINISHED)
        held = max(
            (n for stop in self.stops for n in range(1, len(stop)) if known.endswith(stop[:n])),
            default=0,
        )
        known = known[: len(known) - held]
        return known, count == len(tokens) and len(known) == len(text)

    def settled(self, row: int, tokens: list[int], known: int = 0) -> tuple[int, str]:
        """Returns the first tokens of a growing row whose text can no longer change, and that text.

        Args:
          row: its number.
          tokens: its new tokens.
          known: the number of them that are settled already.

        Returns:
          Their number, at least `known`, and the text of just these tokens.
        """
        certain, whole = self._certain(row, tokens)
        if whole:  # mostly
            return len(tokens), certain
        low, high, middle = known, len(tokens), len(tokens)
        settled = None
        while low < high:
            text = self.decode(row, tokens[:middle])
            if certain.startswith(text):
                low, settled = middle, text
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        return low, self.decode(row, tokens[:low]) if settled is None else settled

    def pieces(
        self, row: int, tokens: list[int], text: str, start: int = 0, sent: int = 0
    ) -> list[str]:
        """Returns the characters that each of the tokens from `start` on adds to the text.

        A character that several tokens spell belongs to the last of them.  Characters of a stop
        string belong to none, and neither do special tokens.

        Args:
          row: its number.
          tokens: its new tokens.
          text: their text, as far as it is shown.
          start: the tokens before this one are left out.
          sent: the characters of the tokens before `start`.

        Returns:
          One text for each token; joined they are `text[sent:]`.
        """
        shown, new = text[sent:], tokens[start:]
        made = self.words.characters(new)
        joined = "".join(made)
        # The first word of a text may lose its space, and a stop string cuts the end.
        lost = int(not joined.startswith(shown) and joined.startswith(" ") and start == 0)
        if joined[lost:].startswith(shown):
            sizes = itertools.accumulate(map(len, made), initial=-lost)
            ends = [sent + min(max(size, 0), len(shown)) for size in sizes]
        else:  # bytes that are not UTF-8 together
            ends = [sent]
            for count in range(start + 1, len(tokens)):
                same = _common(self.decode(row, tokens[:count]), text)
                ends.append(max(ends[-1], same))
            ends.append(len(text))
        return [text[a:b] for a, b in itertools.pairwise(ends)]


def _common(one: str, other: str) -> int:
    """Returns the length of the longest common prefix of two texts."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
