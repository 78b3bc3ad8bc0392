"""The ingress: an ASGI application that gives each request to a replica, and to another if it dies.

    client -> ingress -> replica 1     (dies)
                      -> replica 2     goes on at the next token

A stream of OpenAI's API or of SGLang's `/generate` goes on at its next token (`events.py`).  Any
other request is sent again, if its answer has not begun.  A request that loses one replica after
another ends with an error, since it may be what ends them.  So does a request that waits while none
serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from specjax.serve.fleet.call import Call, Head, prompt_of
from specjax.serve.fleet.events import DONE, Absent, Chosen, Events, Generated, Lost, Stream, is_new
from specjax.serve.http import (
    HEADER,
    ID,
    Limits,
    Problem,
    is_sglang,
    read_body,
    request_id,
    unless_gone,
)

Ask = Callable[[Call], AsyncGenerator[Head | bytes, None]]
"""Sends a call to some replica, and yields the head and the parts of its answer.

It raises `Lost` if the replica ends before its answer does, `Absent` if none takes the call, and
`Full` if too many calls wait.
"""

_RESUMED = ("/v1/completions", "/v1/chat/completions")

_LOOK = 2.0
"""Seconds between two looks at how many replicas serve, while a call waits for its answer."""

_KEPT = ("content-type", "retry-after", "www-authenticate", "cache-control", ID)
"""The headers of a replica's answer that the client gets."""

_READY = ("/ready", "/health")

_FORKS = 3
"""Replicas that are asked to go on, if they say that the text is another one."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0  # seconds between two tries


async def _some() -> int:
    """Stands for a look at the replicas where nobody can look."""
    return 1


class Full(Exception):
    """Raised if too many calls wait for a replica."""


@dataclasses.dataclass
class Counts:
    """What an ingress has done so far."""

    resumed: int = 0  # streams that went on at another replica, once each time
    repeated: int = 0  # requests that were sent again before their answer began
    lost: int = 0  # that ended with an error, since no replica could go on


@dataclasses.dataclass
class _Losses:
    """The replicas that a request has lost since the last token that its client got."""

    count: int = 0


class Ingress:
    """The state of an ingress."""

    def __init__(
        self, ask: Ask, limits: Limits, patience: float, attempts: int,
        serving: Callable[[], Awaitable[int]],
    ) -> None:  # fmt: skip
        self.ask, self.limits, self.patience, self.attempts = ask, limits, patience, attempts
        self._serving, self._seen, self._next_look = serving, time.monotonic(), 0.0
        self._looking: asyncio.Task[None] | None = None
        self._none = False  # served at the last look
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
        kind = _stream_of(call)
        if kind is not None and isinstance(fields, dict) and fields.get("stream") is True:
            stream, losses = kind(fields, headers.get(HEADER)), _Losses()
            begun = self._begun(lambda: _next(call, stream), losses)
            head, parts = await unless_gone(request, begun)
            if head.status == 200:
                content = self._events(call, stream, parts, losses)
                return StreamingResponse(content, head.status, _kept(head))
        else:
            head, parts = await unless_gone(request, self._begun(lambda: call, _Losses()))
            if head.headers.get("content-type", "").startswith("text/event-stream"):
                return StreamingResponse(_closing(parts), head.status, _kept(head))
        content = b"".join([part async for part in parts if isinstance(part, bytes)])
        return Response(content, head.status, _kept(head))

    async def _begun(
        self, make: Callable[[], Call], losses: _Losses, patient: bool = False
    ) -> tuple[Head, AsyncGenerator[Head | bytes, None]]:
        """Returns the head of an answer, and its parts.

        An answer that is no stream has come as a whole, since its replica may end in between.

        Args:
          make: the call, for the next replica.
          losses: of this request so far.
          patient: wait for a place, too.

        Raises:
          Problem: there is no place, no replica answers in time, or too many ended at it.
        """
        until, pause, forks = time.monotonic() + self.patience, _FIRST_PAUSE, 0
        while True:
            parts, began = self.ask(make()), time.monotonic()
            try:
                head = await self._first(parts)
                forks += head.status == 409
                moves = head.status == 503 or (patient and head.status == 429)
                if not moves and not (patient and head.status == 409 and forks < _FORKS):
                    if not head.headers.get("content-type", "").startswith("text/event-stream"):
                        parts = _again([part async for part in parts])
                    return head, parts
                await parts.aclose()
                why = f"a replica answers with the status {head.status}"
                if head.status == 503 and time.monotonic() - began > _LOOK:
                    self._lose(losses, why)  # it has stopped while it wrote
                    until = time.monotonic() + self.patience
            except Full as error:
                if not patient:
                    raise Problem(429, str(error), headers={"Retry-After": "1"}) from None
                why = str(error)
            except (Lost, StopAsyncIteration) as error:
                why = str(error) or "a replica has ended"
                self.counts.repeated += 1
                if not isinstance(error, Absent):
                    self._lose(losses, why)
                    if time.monotonic() - began > _LOOK:  # it waited for its place, or was written
                        until = time.monotonic() + self.patience
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

    async def _first(self, parts: AsyncGenerator[Head | bytes, None]) -> Head:
        """Returns the head of an answer, for which it waits as long as some replica serves.

        Raises:
          Absent: none has served for `patience` seconds.
        """
        task = asyncio.ensure_future(anext(parts))
        began, look = time.monotonic(), min(_LOOK, max(0.01, self.patience / 4))
        try:
            while not (await asyncio.wait({task}, timeout=look))[0]:
                # One look is for all requests that wait, and none waits for it.
                ready = self._looking is None or self._looking.done()
                if ready and time.monotonic() >= self._next_look:
                    self._next_look = time.monotonic() + look
                    self._looking = asyncio.create_task(self._look())
                if self._nobody(began):
                    raise Absent("none of them serves: see their logs")
            head = task.result()
            assert isinstance(head, Head)
            return head
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def _look(self) -> None:
        self._none = not await self._serving()
        if not self._none:
            self._seen = time.monotonic()

    def _nobody(self, began: float) -> bool:
        """Returns whether none has served for `patience` seconds of a try, as far as is known."""
        now = time.monotonic()
        unknown = now - self._next_look > max(self.patience, _LOOK)  # the look has not ended
        return (self._none or unknown) and now - max(began, self._seen) > self.patience

    def _lose(self, losses: _Losses, why: str) -> None:
        """Counts a replica that has ended.

        Raises:
          Problem: it is one too many.
        """
        losses.count += 1
        if losses.count >= self.attempts:
            self.counts.lost += 1
            raise Problem(
                503, f"{losses.count} replicas in a row have ended at this request, the last one "
                f"with: {why}; it is not sent to another one, since it may be what ends them",
            )  # fmt: skip

    async def _events(
        self,
        call: Call,
        stream: Stream,
        parts: AsyncGenerator[Head | bytes, None],
        losses: _Losses,
    ) -> AsyncIterator[bytes]:
        """Yields the events of a stream, from as many replicas as it takes."""
        try:
            while True:
                try:
                    cut = Events()
                    async for part in parts:
                        for event in cut.add(part) if isinstance(part, bytes) else ():
                            for one in stream.passed(event):
                                losses.count *= not is_new(one)
                                yield one
                            if event == DONE:
                                return
                    raise Lost("a replica has ended")
                except Lost as error:
                    await parts.aclose()
                    self._lose(losses, str(error))
                    make = functools.partial(_next, call, stream)
                    head, parts = await self._begun(make, losses, patient=True)
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


def _stream_of(call: Call) -> Callable[[dict[str, Any], str | None], Stream] | None:
    """Returns the kind of a stream that goes on elsewhere; None for others."""
    if call.path in _RESUMED:
        return Chosen
    return Generated if call.path == "/generate" and is_sglang(call.body) else None


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
            lost = Problem(503, f"{error}; a stream of this route cannot go on elsewhere")
            yield f"data: {json.dumps(lost.body(lorax=False))}\n\n".encode()


def _kept(head: Head) -> dict[str, str]:
    return {name: value for name, value in head.headers.items() if name in _KEPT}


def _fields(body: bytes) -> Any:
    """Returns the fields of a body; None if it has none, which its replica will refuse."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def make_ingress(
    ask: Ask,
    limits: Limits | None = None,
    patience: float = 120.0,
    attempts: int = 8,
    serving: Callable[[], Awaitable[int]] = _some,
) -> Starlette:
    """Returns the ASGI application of an ingress; its `state.ingress` has the counts.

    Args:
      ask: sends a call to a replica.
      limits: of requests; None takes those of a server.
      patience: seconds that a request waits for a replica while none serves.
      attempts: replicas that may end at a request one after the other, without a new token.
      serving: tells how many replicas serve.
    """
    ingress = Ingress(ask, limits or Limits(), patience, attempts, serving)
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
