"""A server in a thread of the tests, and a client that knows no library."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import load

from specjax.serve import Engine

TEMPLATE = b"{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"


@functools.cache
def engine(waiting: int = 64) -> Engine:
    """The tiny pair with all drafters, and a chat template."""
    target, _ = load.models()
    files = {**target.files, "chat_template.jinja": TEMPLATE}
    return Engine(
        dataclasses.replace(target, files=files), load.drafters(), slots=3, waiting=waiting,
        capacity=load.CAPACITY, chunk=load.CHUNK, logprobs=load.LOGPROBS,
        constraint_size=(256, 160),
    )  # fmt: skip


@contextlib.contextmanager
def running(made: Engine, **limits: Any) -> Iterator[tuple[Any, int]]:
    """The server and its port; the engine stays open."""
    from specjax.serve.http import Limits, Server

    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listening.getsockname()[1]
    server = Server(made, Limits(**limits), "127.0.0.1", port)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    until = time.monotonic() + 20
    while not server.started and time.monotonic() < until:
        time.sleep(0.01)
    try:
        yield server, port
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()


def send(
    port: int, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer; `body` is sent as JSON unless it is bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, content, headers)
    answer = connection.getresponse()
    made = answer.status, {name.lower(): value for name, value in answer.getheaders()}
    content = answer.read()
    connection.close()
    return *made, content


def post(port: int, path: str, body: Any, **headers: str) -> Any:
    """The JSON of an answer whose status is 200."""
    status, _, content = send(port, "POST", path, body, **headers)
    assert status == 200, (status, content)
    return json.loads(content)


def events(content: bytes) -> list[Any]:
    """The data of server-sent events; the last one of OpenAI's is "[DONE]"."""
    lines = [line[6:] for line in content.decode().splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
