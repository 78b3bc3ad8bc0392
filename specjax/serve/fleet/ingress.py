"""The ingress: an ASGI application that gives each request to a replica, and to another if it dies.

    client -> ingress -> replica 1     (dies)
                      -> replica 2     goes on at the next token

A stream of OpenAI's API goes on where it was (`events.py`).  Any other request is sent again, if
its answer has not begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from specjax.serve.fleet.call import Call, Head, prompt_of
from specjax.serve.fleet.events import DONE, Events, Lost, Stream
from specjax.serve.http import (
    HEADER,
    ID,
    Limits,
    Problem,
    read_body,
    request_id,
    unless_gone,
)

Ask = Callable[[Call], AsyncGenerator[Head | bytes, None]]
"""Sends a call to some replica, and yields the head and the parts of its answer.

It raises `Lost` if the replica ends before its answer does, and `Full` if too many calls wait.
"""

_RESUMED = ("/v1/completions", "/v1/chat/completions")

_KEPT = ("content-type", "retry-after", "www-authenticate", "cache-control", ID)
"""The headers of a replica's answer that the client gets."""

_READY = ("/ready", "/health")

_FORKS = 3
"""Replicas that are asked to go on, if they say that the text is another one."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0  # seconds between two tries


class Full(Exception):
    """Raised if too many calls wait for a replica."""


@dataclasses.dataclass
class Counts:
    """What an ingress has done so far."""

    resumed: int = 0  # streams that went on at another replica, once each time
    repeated: int = 0  # requests that were sent again before their answer began
    lost: int = 0  # that ended with an error, since no replica could go on


class Ingress:
    """The state of an ingress."""

    def __init__(self, ask: Ask, limits: Limits, patience: float) -> None:
        self.ask, self.limits, self.patience = ask, limits, patience
        self.counts = Counts()
        self.running = 0  # requests that are being answered
        self.draining = False  # new ones get 503

    async def answer(self, request: Request) -> Response:
        rid = uuid.uuid4().hex
        try:
            if self.draining and (request.method == "POST" or request.scope["path"] in _READY):
                raise Problem(503, "the fleet is stopping", headers={"Retry-After": "5"})
            rid = request_id(request.headers, rid)
            return await self._answer(request, rid)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Problem as problem:
            answer = problem.answer(lorax=False)
            answer.headers[ID] = rid
            return answer

    async def live(self, request: Request) -> Response:
        """Says that the fleet is there, also while all replicas are full or the fleet drains."""
        return JSONResponse({"status": "ok"})

    async def refuse(self, request: Request, error: Exception) -> Response:
        what = f"{request.method} {request.scope['path']} is no route of this fleet"
        return Problem(404, f"{what}: see docs/serving.md").answer(lorax=False)

    async def figures(self, request: Request) -> Response:
        return JSONResponse(dataclasses.asdict(self.counts))

    async def _answer(self, request: Request, rid: str) -> Response:
        body = await read_body(request, self.limits) if request.method == "POST" else b""
        headers = {name.lower(): value for name, value in request.headers.items()} | {ID: rid}
        headers.pop("content-length", None)
        fields = _fields(body)
        call = Call(request.method, request.scope["path"], headers, body, prompt_of(fields))
        if call.path in _RESUMED and isinstance(fields, dict) and fields.get("stream") is True:
            stream = Stream(fields, headers.get(HEADER))
            head, parts = await unless_gone(request, self._begun(lambda: _next(call, stream)))
            if head.status == 200:
                content = self._events(call, stream, parts)
                return StreamingResponse(content, head.status, _kept(head))
        else:
            head, parts = await unless_gone(request, self._begun(lambda: call))
            if head.headers.get("content-type", "").startswith("text/event-stream"):
                return StreamingResponse(_closing(parts), head.status, _kept(head))
        content = b"".join([part async for part in parts if isinstance(part, bytes)])
        return Response(content, head.status, _kept(head))

    async def _begun(
        self, make: Callable[[], Call], patient: bool = False
    ) -> tuple[Head, AsyncGenerator[Head | bytes, None]]:
        """Returns the head of an answer, and its parts.

        An answer that is no stream has come as a whole, since its replica may end in between.

        Args:
          make: the call, for the next replica.
          patient: wait for a place, too.

        Raises:
          Problem: there is no place, or no replica answers in time.
        """
        until, pause, forks = time.monotonic() + self.patience, _FIRST_PAUSE, 0
        while True:
            parts = self.ask(make())
            try:
                head = await anext(parts)
                assert isinstance(head, Head)
                forks += head.status == 409
                moves = head.status == 503 or (patient and head.status == 429)
                if not moves and not (patient and head.status == 409 and forks < _FORKS):
                    if not head.headers.get("content-type", "").startswith("text/event-stream"):
                        parts = _again([part async for part in parts])
                    return head, parts
                await parts.aclose()
                why = f"a replica answers with the status {head.status}"
            except Full as error:
                if not patient:
                    raise Problem(429, str(error), headers={"Retry-After": "1"}) from None
                why = str(error)
            except (Lost, StopAsyncIteration) as error:
                why = str(error) or "a replica has ended"
                self.counts.repeated += 1
            except BaseException:
                await parts.aclose()
                raise
            if time.monotonic() > until:
                self.counts.lost += 1
                raise Problem(
                    503, f"no replica could answer within {self.patience:g} s: {why}; try again "
                    "later", headers={"Retry-After": "5"},
                )  # fmt: skip
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _events(
        self, call: Call, stream: Stream, parts: AsyncGenerator[Head | bytes, None]
    ) -> AsyncIterator[bytes]:
        """Yields the events of a stream, from as many replicas as it takes."""
        try:
            while True:
                try:
                    cut = Events()
                    async for part in parts:
                        for event in cut.add(part) if isinstance(part, bytes) else ():
                            for one in stream.passed(event):
                                yield one
                            if event == DONE:
                                return
                    raise Lost("a replica has ended")
                except Lost:
                    await parts.aclose()
                    head, parts = await self._begun(lambda: _next(call, stream), patient=True)
                    self.counts.resumed += 1
                    if head.status != 200:
                        content = [part async for part in parts if isinstance(part, bytes)]
                        self.counts.lost += 1
                        yield b"data: " + b"".join(content).replace(b"\n", b" ") + b"\n\n"
                        yield DONE
                        return
        except Problem as problem:
            yield f"data: {json.dumps(problem.body(lorax=False))}\n\n".encode()
            yield DONE
        finally:
            await parts.aclose()


class _Counting:
    """Counts the requests that are answered, from their head to the end of their stream."""

    def __init__(self, app: ASGIApp, ingress: Ingress) -> None:
        self._app, self._ingress = app, ingress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        counts = scope["type"] == "http"  # and not "lifespan", which lasts as long as the server
        self._ingress.running += counts
        try:
            await self._app(scope, receive, send)
        finally:
            self._ingress.running -= counts


def _next(call: Call, stream: Stream) -> Call:
    return dataclasses.replace(
        call, body=stream.next_body(), headers=stream.next_headers(call.headers)
    )


async def _again(parts: list[Head | bytes]) -> AsyncGenerator[Head | bytes, None]:
    for part in parts:
        yield part


async def _closing(parts: AsyncGenerator[Head | bytes, None]) -> AsyncIterator[bytes]:
    """Yields the parts of a stream that cannot go on elsewhere."""
    async with contextlib.aclosing(parts):
        try:
            async for part in parts:
                if isinstance(part, bytes):
                    yield part
        except Lost as error:
            lost = Problem(503, f"{error}; streams of /v1 go on elsewhere, this one cannot")
            yield f"data: {json.dumps(lost.body(lorax=False))}\n\n".encode()


def _kept(head: Head) -> dict[str, str]:
    return {name: value for name, value in head.headers.items() if name in _KEPT}


def _fields(body: bytes) -> Any:
    """Returns the fields of a body; None if it has none, which its replica will refuse."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def make_ingress(ask: Ask, limits: Limits | None = None, patience: float = 120.0) -> Starlette:
    """Returns the ASGI application of an ingress; its `state.ingress` has the counts.

    Args:
      ask: sends a call to a replica.
      limits: of requests; None takes those of a server.
      patience: seconds that a request waits for a replica, where its own has ended.
    """
    ingress = Ingress(ask, limits or Limits(), patience)
    app = Starlette(
        routes=[
            Route("/fleet", ingress.figures, methods=["GET"]),
            Route("/live", ingress.live, methods=["GET"]),
            Route("/{path:path}", ingress.answer, methods=["GET", "POST"]),
        ],
        middleware=[Middleware(_Counting, ingress)],
        exception_handlers={404: ingress.refuse, 405: ingress.refuse},
    )
    app.state.ingress = ingress
    return app
