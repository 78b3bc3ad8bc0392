"""The `id` of a server-sent event: where each text of a stream is, for a client that comes back.

    id: 05e5026c2f811f26.1d0f3ab2c4e5f607.3.12-57-9f86d081884c7d65-0,7-31-2c26b46b68ffc68f-0
        the model        the request      seed
                                            tokens-characters-hash of the tokens-last chunks
                                            of each text

A client sends the same request with the last id as the header `Last-Event-ID`, to this server or
to another one, as a browser's `EventSource` does by itself.  The server keeps nothing: the id says
what to leave out, and its hashes find another model, another request and another text.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence

import numpy as np

from specjax.serve.http.problems import Problem, refuse
from specjax.serve.resuming import Delivered

HEADER = "last-event-id"

_ID = re.compile(r"([0-9a-f]+)\.([0-9a-f]+)\.(-?\d{1,20})\.([0-9a-f,-]+)")
_PLACE = re.compile(r"(\d{1,9})-(\d{1,9})-([0-9a-f]+)-(\d{1,3})")


class Place:
    """What was sent of one text."""

    def __init__(self) -> None:
        self.count, self.characters = 0, 0  # tokens, characters
        self.tail = 0  # of the chunks that end the text
        self._hash = hashlib.sha256()

    def add(self, tokens: Sequence[int]) -> None:
        """Counts more tokens."""
        self.count += len(tokens)
        self._hash.update(np.asarray(tokens, np.int32).tobytes())

    def __str__(self) -> str:
        return f"{self.count}-{self.characters}-{self._hash.hexdigest()[:16]}-{self.tail}"


@dataclasses.dataclass(frozen=True)
class Seen:
    """An id that a client sent back."""

    model: str
    request: str
    seed: int
    delivered: tuple[Delivered, ...]
    characters: tuple[int, ...]
    tails: tuple[int, ...]

    @classmethod
    def read(cls, text: str | None) -> Seen | None:
        """Reads the header; None without one.

        Raises:
          Problem: it is no id of this server.
        """
        if text is None:
            return None
        found = _ID.fullmatch(text.strip())
        places = [] if found is None else [_PLACE.fullmatch(x) for x in found[4].split(",")]
        if found is None or not all(places):
            refuse(
                f"Last-Event-ID: {text[:80]!r} is not an id of this server's streams: send the id "
                "of the last event as it came, or leave the header out to start the text again"
            )
        parts = [place.groups() for place in places if place is not None]
        return cls(
            found[1], found[2], int(found[3]),
            tuple(Delivered(int(count), None, digest) for count, _, digest, _ in parts),
            tuple(int(characters) for _, characters, _, _ in parts),
            tuple(int(tail) for *_, tail in parts),
        )  # fmt: skip

    def check(self, model: str, request: str, texts: int) -> None:
        """Raises Problem if the id is of another model or another request."""
        if self.model != model:
            raise Problem(
                409, f"Last-Event-ID is of the model {self.model}, and this server has {model}: "
                "its weights, its configuration or its tokenizer differ, so the text would be "
                "another; resume it at a server with the same model, or start it again",
            )  # fmt: skip
        if self.request != request or len(self.delivered) != texts:
            raise Problem(
                409, "Last-Event-ID is of another request: send the same prompt, settings and seed "
                "as in the request whose stream is resumed",
            )  # fmt: skip


def event_id(model: str, request: str, seed: int, places: Sequence[Place]) -> str:
    """Returns the id of an event after which the texts of a stream are at `places`."""
    return f"{model}.{request}.{seed}.{','.join(map(str, places))}"
