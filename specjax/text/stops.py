"""Token ids to text as it grows: what is certain of it, and where a stop string cuts it."""

from __future__ import annotations

from specjax.models import LanguageModel


class Texts:
    """Of the rows of one batch."""

    def __init__(self, target: LanguageModel, before: list[int], stops: tuple[str, ...]):
        self.target, self.stops = target, stops
        self._before = before  # the last token of each prompt

    def decode(self, row: int, tokens: list[int]) -> str:
        """The text of the new tokens.  Decoded behind the prompt's last one: alone, some lose a leading space."""
        if self.target.tokenizer is None:
            return ""
        before = self.target.tokenizer.decode([self._before[row]])
        whole = self.target.tokenizer.decode([self._before[row], *tokens])
        return (
            whole[len(before) :]
            if whole.startswith(before)
            else self.target.tokenizer.decode(tokens)
        )

    def cut(self, row: int, tokens: list[int]) -> tuple[list[int], str, bool]:
        """The fewest tokens whose text contains a stop string, the text before it, and True; or all, and False."""
        text = self.decode(row, tokens)
        if not any(stop in text for stop in self.stops):
            return tokens, text, False
        low, high = 1, len(tokens)
        while low < high:
            middle = (low + high) // 2
            found = any(stop in self.decode(row, tokens[:middle]) for stop in self.stops)
            low, high = (low, middle) if found else (middle + 1, high)
        text = self.decode(row, tokens[:low])
        return tokens[:low], text[: min(at for at in map(text.find, self.stops) if at >= 0)], True

    def certain(self, text: str) -> str:
        """What of a growing text cannot change any more: no half character, no beginning of a stop string."""
        text = text.rstrip("\ufffd")
        held = max(
            (n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n])),
            default=0,
        )
        return text[: len(text) - held]
