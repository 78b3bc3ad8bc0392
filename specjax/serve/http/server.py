"""uvicorn around the application: SIGTERM ends a server after it has answered what it accepted."""

from __future__ import annotations

import asyncio
import functools
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from specjax.serve.engine import Engine
from specjax.serve.http.app import Service, make_app
from specjax.serve.http.arriving import Limits

_IDLE_SECONDS = 5
_CONNECTIONS = 2048
_HEADER_BYTES = 64 * 1024


class TimedProtocol(H11Protocol):
    """Drops a connection on which the headers of a request do not arrive in time.

    uvicorn waits for them without an end, so a client that sends half of them, or nothing, would
    keep its connection for ever.
    """

    def __init__(self, *given: Any, seconds: float, **named: Any) -> None:
        super().__init__(*given, **named)
        self._seconds = seconds
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        # h11 is IDLE until it has read the headers of a request.  Between two requests uvicorn's
        # own limit holds until the first byte arrives.
        if self.conn.their_state is not h11.IDLE:
            self._arrived()
        elif self._deadline is None and self.conn.trailing_data[0]:
            self._wait()

    def _wait(self) -> None:
        self._deadline = self.loop.call_later(self._seconds, self.transport.close)

    def _arrived(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Server(uvicorn.Server):
    """A server that answers 503 to new requests once it was told to stop.

    A second signal stops it at once.
    """

    def __init__(self, engine: Engine, limits: Limits, host: str, port: int) -> None:
        app = make_app(engine, limits)
        self.service: Service = app.state.service
        self.drain = limits.drain
        super().__init__(
            uvicorn.Config(
                app, host, port, log_level="warning", access_log=False, lifespan="off",
                timeout_keep_alive=_IDLE_SECONDS, limit_concurrency=_CONNECTIONS,
                h11_max_incomplete_event_size=_HEADER_BYTES, timeout_graceful_shutdown=10,
                http=functools.partial(TimedProtocol, seconds=limits.header_seconds),  # type: ignore
                ws="none",
            )
        )  # fmt: skip

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.service.draining:
            self.should_exit = self.force_exit = True
            return
        self.service.draining = True
        threading.Thread(target=self._exit_when_idle, daemon=True).start()

    def _exit_when_idle(self) -> None:
        until = time.monotonic() + self.drain
        load = self.service.engine.load()
        while time.monotonic() < until and (self.service.running or load.running or load.waiting):
            time.sleep(0.02)
            load = self.service.engine.load()
        self.should_exit = True


def serve(
    engine: Engine, limits: Limits, host: str, port: int, started: Callable[[str, int], None]
) -> None:
    """Serves until SIGTERM or SIGINT, and closes the engine.

    Raises:
      OSError: the address cannot be used.
    """
    # uvicorn would print such an error and exit; here it becomes a line of the command.
    listening = socket.create_server(
        (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024
    )
    server = Server(engine, limits, host, port)
    try:
        started(*listening.getsockname()[:2])
        server.run(sockets=[listening])
    finally:
        listening.close()
        engine.close(finish=False)
        if server.service.tracing is not None:
            server.service.tracing.close()
