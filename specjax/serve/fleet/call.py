"""A request of HTTP as a message between processes, and the ASGI application that answers it.

Call(method, path, headers, body)   ->   Head(status, headers), bytes, bytes, ...
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message

_SHOWN = 4096
"""The characters of a prompt by which requests with one beginning find each other."""

_LEAVING = 10.0
"""Seconds that an application has to end a request whose client has gone."""


class Head(NamedTuple):
    """The beginning of an answer."""

    status: int
    headers: dict[str, str]  # with names in lower case


@dataclasses.dataclass(frozen=True)
class Call:
    """A request.

    Attributes:
      prompt: the beginning of the prompt as a text, never empty, which Ray's routers read.
    """

    method: str
    path: str
    headers: dict[str, str]  # with names in lower case
    body: bytes = b""
    prompt: str = "-"


def prompt_of(fields: object) -> str:
    """Returns the beginning of the prompt of a body, as routers compare it; never empty."""
    if not isinstance(fields, dict):
        return "-"
    for name in ("messages", "prompt", "text", "input_ids", "inputs"):
        if fields.get(name):
            value = fields[name]
            return (value if isinstance(value, str) else json.dumps(value))[:_SHOWN]
    return "-"


async def answers(app: ASGIApp, call: Call) -> AsyncIterator[Head | bytes]:
    """Yields the head and the parts of the answer of an application.

    If nobody reads on, the application gets the message that its client has gone.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    gone, asked = asyncio.Event(), False

    async def receive() -> Message:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": call.body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def work() -> None:
        try:
            await app(_scope(call), receive, sent.put)
        finally:
            await sent.put(None)

    task = asyncio.create_task(work())
    try:
        while (message := await sent.get()) is not None:
            if message["type"] == "http.response.start":
                names = {name.decode("latin-1"): value.decode("latin-1")
                         for name, value in message["headers"]}  # fmt: skip
                yield Head(message["status"], names)
            elif message.get("body"):
                yield message["body"]
        await task  # raises what the application raised
    finally:
        gone.set()
        # A task that is cancelled while a thread submits its request would lose the handles.
        await asyncio.wait({task}, timeout=_LEAVING)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def _scope(call: Call) -> dict[str, Any]:
    headers = [(name.encode("latin-1"), value.encode("latin-1"))
               for name, value in call.headers.items()]  # fmt: skip
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
        "method": call.method, "scheme": "http", "path": call.path, "raw_path": call.path.encode(),
        "query_string": b"", "root_path": "", "headers": headers, "client": None, "server": None,
    }  # fmt: skip
