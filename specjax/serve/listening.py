"""Starts the HTTP server of an engine; its packages are imported only here."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable

from specjax._internal.extras import imported, install
from specjax.serve.engine import Engine

_PACKAGES = ("starlette", "uvicorn", "pydantic", "sse_starlette", "prometheus_client")


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """The address and the limits of a server.

    Attributes:
      host, port: the address; port 0 is any free one.
      api_key: the key that clients must send; None: they need no key.
      body: the most bytes of a request.
      texts: the most texts that one request may ask for.
      drain: seconds in which accepted requests are finished after SIGTERM.
      traces: the address of a collector of OpenTelemetry; None sends none.
      admin: take the requests of a trainer: pause, abort, flush, weights of a folder.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    body: int = 4 * 2**20
    texts: int = 16
    drain: float = 300.0
    traces: str | None = None
    admin: bool = False


def check_packages() -> None:
    """Raises ImportError if a package of the extra `serve` is missing."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"serving needs {', '.join(missing)}: {install('serve')}")


def check_traces(endpoint: str) -> None:
    """Raises ValueError if traces cannot be sent: no address of HTTP, or a package is missing."""
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(
            f"traces go to an address such as http://localhost:4318/v1/traces, not {endpoint}"
        )
    for package in ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        imported(package, f"traces need {package}: {install('otel')}")


def run_server(engine: Engine, options: ServerOptions, started: Callable[[str, int], None]) -> None:
    """Serves until SIGTERM or SIGINT, and closes the engine.

    Args:
      started: called with the address once the server listens.

    Raises:
      ImportError: as `check_packages`.
      OSError: the address cannot be used.
    """
    check_packages()
    from specjax.serve.http import Limits, serve

    limits = Limits(
        options.api_key, options.body, texts=options.texts, drain=options.drain,
        traces=options.traces,
        admin=options.admin,
    )  # fmt: skip
    serve(engine, limits, options.host, options.port, started)
