"""What arrives with a request: its body within limits, and its id."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Mapping

from starlette.requests import Request

from specjax.serve.http.problems import Problem

ID = "x-request-id"

_SENT_ID = re.compile(r"[!-~]{1,200}")


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of the requests that a server accepts.

    Attributes:
      api_key: requests have to send it as `Authorization: Bearer KEY`; None: they need none.
      body: the most bytes of a request.
      header_seconds: the headers of a request have to arrive in so many seconds.
      body_seconds: a body has to arrive in so many seconds.
      send_seconds: a client that reads nothing for so long is dropped.
      texts: the most texts that one request may ask for (prompts times n).
      drain: seconds in which accepted requests are finished after SIGTERM.
      traces: the address of a collector of OpenTelemetry, which gets a span for each text.
      admin: whoever may send requests may also pause the server, abort requests of others, and
        give it the weights of a folder of its machine.
    """

    api_key: str | None = None
    body: int = 4 * 2**20
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    send_seconds: float = 60.0
    texts: int = 16
    drain: float = 300.0
    traces: str | None = None
    admin: bool = False


async def read_body(request: Request, limits: Limits) -> bytes:
    """Returns the body, if it is small enough and arrives in time.

    Raises:
      Problem: it is larger than the limit, or does not arrive.
    """
    most = limits.body
    too_large = Problem(413, f"the body is larger than {most} bytes")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > most:
        raise too_large
    content = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                content += part
                if len(content) > most:
                    raise too_large
    except TimeoutError:
        raise Problem(408, f"the body did not arrive in {limits.body_seconds:g} s") from None
    return bytes(content)


def request_id(headers: Mapping[str, str], default: str) -> str:
    """Returns the id that a request has in its headers, or another one.

    Raises:
      Problem: an id that no header could give back.
    """
    sent = headers.get(ID, default)
    if not _SENT_ID.fullmatch(sent):
        raise Problem(
            400, f"X-Request-Id {sent[:80]!r}: send 1 to 200 visible ASCII characters, or leave "
            "it out",
        )  # fmt: skip
    return sent
