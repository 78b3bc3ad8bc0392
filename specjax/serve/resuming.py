"""Resuming: the tokens that a client has of a text, and the check that they are written again.

    delivered      a b c d e f          the client has them
    written again  a b c d e f g h      by the same or another engine; the client gets g h

A text depends on its prompt, its settings and its seed, so any engine with the same weights writes
it.  Where one does not, the client may not get a text of two halves: it gets a `Disagreement`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from specjax.serve.identity import tokens_hash


class Disagreement(Exception):
    """Raised if the tokens that are written again are not those that were delivered.

    Attributes:
      position: of the first token that differs, from 0 on; None if only a hash was compared.
      expected: the token that was delivered; None as above.
      got: the token that is written now; None as above, and if the text ends before.
    """

    def __init__(
        self, what: str, position: int | None = None, expected: int | None = None,
        got: int | None = None,
    ) -> None:  # fmt: skip
        cure = "the weights, the settings or the machine are not those that wrote it"
        super().__init__(f"{what}: {cure}; start the text again, or resume it elsewhere")
        self.position, self.expected, self.got = position, expected, got


@dataclasses.dataclass(frozen=True)
class Delivered:
    """The first tokens of a text, which a client has.

    Attributes:
      count: how many.
      tokens: these tokens, or None if only their hash is known.
      digest: `tokens_hash` of them, or None.
    """

    count: int = 0
    tokens: tuple[int, ...] | None = None
    digest: str | None = None

    def check(self, tokens: Sequence[int], known: int, ended: bool) -> None:
        """Raises Disagreement if a growing text does not begin with these tokens.

        Args:
          tokens: of the text so far.
          known: the first of them, which were checked before.
          ended: no more tokens will come.
        """
        if known >= self.count:
            return
        if self.tokens is not None:
            pairs = zip(self.tokens[known:], tokens[known:], strict=False)
            for position, (expected, got) in enumerate(pairs, known):
                if expected != got:
                    raise Disagreement(
                        f"token {position} of the resumed text was {expected} and is {got} now",
                        position, expected, got,
                    )  # fmt: skip
        if ended and len(tokens) < self.count:
            expected = None if self.tokens is None else self.tokens[len(tokens)]
            raise Disagreement(
                f"{self.count} tokens of the resumed text were delivered, and it ends after "
                f"{len(tokens)} now", len(tokens), expected,
            )  # fmt: skip
        if self.digest is not None and len(tokens) >= self.count:
            if tokens_hash(tokens[: self.count]) != self.digest:
                raise Disagreement(f"the first {self.count} tokens of the resumed text differ")
