"""The text of a growing row: which part of it is final, and where a stop string cuts it."""

from __future__ import annotations

from specjax.models import LanguageModel


class Texts:
    """Decodes the rows of one batch."""

    def __init__(self, target: LanguageModel, before: list[int], stops: tuple[str, ...]) -> None:
        self.target, self.stops = target, stops
        self._before = before  # the last token of each prompt

    def decode(self, row: int, tokens: list[int]) -> str:
        """The text of the new tokens.

        They are decoded together with the prompt's last token, since some tokens lose a leading
        space if they are decoded alone.
        """
        if self.target.tokenizer is None:
            return ""
        before = self.target.tokenizer.decode([self._before[row]])
        together = self.target.tokenizer.decode([self._before[row], *tokens])
        return (
            together[len(before) :]
            if together.startswith(before)
            else self.target.tokenizer.decode(tokens)
        )

    def cut(self, row: int, tokens: list[int]) -> tuple[list[int], str, bool]:
        """Cut the tokens and the text of a row at its first stop string.

        Returns:
          The fewest first tokens whose text contains a stop string, the text before that string,
          and True.  Without a stop string: all tokens, their text and False.
        """
        text = self.decode(row, tokens)
        if not any(stop in text for stop in self.stops):
            return tokens, text, False
        low, high = 1, len(tokens)
        while low < high:
            middle = (low + high) // 2
            stopped = any(stop in self.decode(row, tokens[:middle]) for stop in self.stops)
            low, high = (low, middle) if stopped else (middle + 1, high)
        text = self.decode(row, tokens[:low])
        return tokens[:low], text[: min(at for at in map(text.find, self.stops) if at >= 0)], True

    def certain(self, text: str) -> str:
        """The part of a growing text that can no longer change.

        It ends before an incomplete character and before the beginning of a stop string.
        """
        text = text.rstrip("\ufffd")
        held = max(
            (n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n])),
            default=0,
        )
        return text[: len(text) - held]
