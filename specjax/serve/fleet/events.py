"""What a client has of a stream, so that another replica goes on at the next token.

    replica 1    id 1   id 2   (dies)
    replica 2                  Last-Event-ID: id 2, resume.token_ids: ...    id 3   id 4   [DONE]
    client       id 1   id 2                                                 id 3   id 4   [DONE]

A text depends on its prompt, its settings and its seed.  So the seed is drawn here, before the
first replica, and each replica that goes on writes the same text.  It compares the tokens that the
client has with those that it writes, as drafts where its engine has room for them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Protocol

from specjax.serve.http import HEADER
from specjax.types import Json

DONE = b"data: [DONE]\n\n"

_LOST = (429, 503)
"""Statuses of a replica that is full, stops or has stopped; another one may answer."""


class Lost(Exception):
    """Raised if the replica that answers has ended, or is about to."""


class Absent(Lost):
    """Raised if no replica takes a call."""


class Stream(Protocol):
    """One stream, from the first replica to the last one."""

    def next_body(self) -> bytes:
        """Returns the body to send to the next replica."""
        ...

    def next_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Returns the headers to send with it."""
        ...

    def passed(self, event: bytes) -> Iterator[bytes]:
        """Yields what the client gets of an event of a replica.

        Raises:
          Lost: the event says that the replica has stopped.
        """
        ...


class Generated:
    """A stream of SGLang's `/generate`, whose chunks have all tokens of a text so far."""

    def __init__(self, fields: Mapping[str, Json], last_id: str | None) -> None:
        self._fields, self._last_id = dict(fields), last_id
        self._tokens: dict[int, list[Json]] = {}
        self._moved = False

    def next_body(self) -> bytes:
        fields = dict(self._fields)
        if self._moved:
            fields.pop("resume", None)  # of the id that the client came with
            counts = [int(place.split("-")[0]) for place in _places(self._last_id)]
            tokens = [self._tokens.get(index, []) for index in range(len(counts))]
            # Without the tokens before the client's own id, the hashes of the id are compared.
            if [len(ids) for ids in tokens] == counts:
                fields["resume"] = {"token_ids": tokens}
        return json.dumps(fields).encode()

    def next_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        return _with_id(headers, self._last_id)

    def passed(self, event: bytes) -> Iterator[bytes]:
        name, data = _read(event)
        if data is not None and data != "[DONE]":
            chunk = json.loads(data)
            _refuse_lost(chunk)
            if name is not None:
                self._last_id, self._moved = name, True
                self._tokens[chunk.get("index", 0)] = chunk["output_ids"]
        yield event


class Chosen:
    """A stream of OpenAI's API, whose chunks have what is new of a choice."""

    def __init__(self, fields: Mapping[str, Json], last_id: str | None) -> None:
        """Begins a stream.

        Args:
          fields: the body of the request, of which `stream` is true.
          last_id: the header `Last-Event-ID` of the client.
        """
        self._fields = dict(fields)
        if self._fields.get("seed") is None and last_id is None:
            self._fields["seed"] = secrets.randbits(32)
        self._last_id = last_id
        given = self._fields.get("resume")
        self._given = given if isinstance(given, dict) else {}
        own = self._given.get("token_ids")
        # Without the tokens before the client's own id, the hashes of the id are compared.
        self._knows = last_id is None or isinstance(own, list)
        self._tokens: dict[int, list[Json]] = {}
        if isinstance(own, list):
            self._tokens = {n: list(x) for n, x in enumerate(own) if isinstance(x, list)}
        self._head: dict[str, Json] | None = None  # the fields of all chunks, of the first replica
        self._opening = 0  # chunks without an id before the first one with an id
        self._skip = 0  # of them, to leave out now
        self._moved = False
        self._ended = False  # only the last event is missing

    def next_body(self) -> bytes:
        self._skip = 0
        fields = dict(self._fields)
        if self._head is not None and self._moved and self._knows:
            count = len(_places(self._last_id))
            tokens = [self._tokens.get(index, []) for index in range(count)]
            fields["resume"] = {**self._given, "token_ids": tokens}
        elif self._head is not None:
            self._skip = self._opening
        return json.dumps(fields).encode()

    def next_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        return _with_id(headers, self._last_id)

    def passed(self, event: bytes) -> Iterator[bytes]:
        name, data = _read(event)
        if data is None:
            yield event  # a comment
            return
        if data == "[DONE]":
            yield event
            return
        chunk = json.loads(data)
        _refuse_lost(chunk)
        if "error" in chunk:
            yield event
            return
        if name is None and chunk.get("choices"):
            if self._skip:
                self._skip -= 1
                return
            self._opening += 1
        if name is None and not chunk.get("choices"):
            if self._ended:
                return
            self._ended = True
        if self._head is None:
            self._head = {key: chunk[key] for key in ("id", "created") if key in chunk}
        elif any(chunk.get(key) != value for key, value in self._head.items()):
            data = json.dumps(chunk | self._head, ensure_ascii=False)
            event = (f"id: {name}\n" if name else "").encode() + f"data: {data}\n\n".encode()
        if name is not None:
            self._last_id, self._moved = name, True
        for choice in chunk.get("choices", ()):
            self._tokens.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
        yield event


class Events:
    """Cuts the bytes of a stream into its events, whatever the parts are in which they come."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, part: bytes) -> list[bytes]:
        """Returns the events that end in this part, each with its blank line."""
        *whole, self._rest = (self._rest + part).split(b"\n\n")
        return [one + b"\n\n" for one in whole]


def is_new(event: bytes) -> bool:
    """Returns whether an event brings tokens: it has an id."""
    return _read(event)[0] is not None


def _refuse_lost(chunk: Mapping[str, Json]) -> None:
    """Raises Lost if a chunk says that its replica has stopped."""
    error = chunk.get("error")
    if isinstance(error, Mapping) and error.get("code") in _LOST:
        raise Lost(str(error.get("message")))


def _with_id(headers: Mapping[str, str], last_id: str | None) -> dict[str, str]:
    own = {name: value for name, value in headers.items() if name != HEADER}
    return own if last_id is None else {**own, HEADER: last_id}


def _places(last_id: str | None) -> list[str]:
    """Returns the places of the texts of an id."""
    return str(last_id).rsplit(".", 1)[-1].split(",")


def _read(event: bytes) -> tuple[str | None, str | None]:
    """Returns the id and the data of an event; None where it has none."""
    name = data = None
    for line in event.decode().split("\n"):
        if line.startswith("id: "):
            name = line[4:]
        elif line.startswith("data: "):
            data = line[6:]
    return name, data
