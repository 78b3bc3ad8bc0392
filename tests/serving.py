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

import jax
import load
import numpy as np
import table_pair

import specjax
from specjax.methods import BoundDrafter, MedusaHeads, initial_medusa
from specjax.serve import Engine

TEMPLATE = (
    b"{% if tools %}<tool_call>{{ tools|length }}{% endif %}"
    b"{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
)


@functools.cache
def models() -> tuple[specjax.LanguageModel, specjax.LanguageModel]:
    """Table models for the tiny pair, with a chat template."""
    target, draft = (
        table_pair.language_model(load.TINY / name, flips)
        for name, flips in (("target", 0.0), ("draft", 0.02))
    )
    return dataclasses.replace(target, files={"chat_template.jinja": TEMPLATE}), draft


def drafters() -> dict[str, specjax.Drafter]:
    """Those of `load.drafters` for these models; the heads are random."""
    target, draft = models()
    matrix = target.params["head"]["kernel"]
    heads, rng = MedusaHeads(2, *matrix.shape), np.random.default_rng(1)

    def adapter(name: str, noise: float) -> specjax.MedusaAdapter:
        params = jax.tree.map(
            lambda x: x + np.float32(noise) * rng.standard_normal(x.shape, np.float32),
            initial_medusa(heads, matrix),
        )
        choices = ((0,), (1,), (0, 0))
        return specjax.MedusaAdapter(params=params, name=name, heads=heads, choices=choices)

    return {
        "lookup": BoundDrafter(specjax.NGram(4, min_ngram=1)),
        "draft": specjax.make_drafter(target, draft, num_drafts=3),
        "tree": specjax.make_drafter(target, draft, specjax.StaticTree, branching=(2, 1)),
        "medusa": specjax.MedusaBank.create(
            {"one": adapter("one", 0.0), "two": adapter("two", 0.05)}
        ),
    }


@functools.cache
def engine(waiting: int = 64) -> Engine:
    """The pair of tables with all drafters."""
    return Engine(
        models()[0], drafters(), slots=3, waiting=waiting,
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
