"""A fleet on several nodes of Ray, each with its own raylet: nodes die, slices lose a process, and
the number of replicas follows the load.  Each stream is that of one engine that nobody disturbs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from unittest import mock

import pytest

ray = pytest.importorskip("ray")

import fleets  # noqa: E402
import together  # noqa: E402
from several_devices import environment  # noqa: E402

from specjax.serve import fleet  # noqa: E402

# Ray warns of sockets and processes of its own, which it keeps until this process ends.
pytestmark = pytest.mark.filterwarnings("ignore")

TABLES = functools.partial(fleets.engine, "tables")


@pytest.fixture
def port(monkeypatch) -> int:
    paths = [str(fleets.HERE), str(fleets.HERE.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


@contextlib.contextmanager
def cluster() -> Iterator[Any]:
    """A head node without engines."""
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    ray.init(address=made.address, log_to_driver=False)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def serving(app: str = "specjax") -> int:
    """The number of replicas that serve."""
    from ray import serve  # pyright: ignore[reportMissingImports]

    found = serve.status().applications[app].deployments["replicas"]
    return found.replica_states.get("RUNNING", 0)


def waited(until: Callable[[], bool], seconds: float = 900.0) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.2)


def counts(port: int) -> dict[str, int]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/fleet")
    return json.loads(connection.getresponse().read())


class Streams:
    """Clients in threads, until they are told to stop; what each asked and got."""

    def __init__(self, port: int, request: Callable[[int], Any], threads: int) -> None:
        self.asked: list[Any] = []
        self.got: list[Any] = []
        self._port, self._request = port, request
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(threads)
        self._made = [self._pool.submit(self._client) for _ in range(threads)]

    def _client(self) -> None:
        while not self._ended.is_set():
            with self._lock:
                number = len(self.asked)
                self.asked.append(self._request(number))
                self.got.append(None)
            self.got[number] = fleets.streamed(self._port, *self.asked[number])

    def flow(self) -> None:
        """Waits until as many streams more have ended as there are clients, or a client fails."""

        def ended() -> int:
            return len(self.got) - self.got.count(None)

        enough = ended() + len(self._made)
        waited(lambda: ended() >= enough or any(one.done() for one in self._made))

    def close(self) -> None:
        self._ended.set()
        for one in self._made:
            one.result(300)  # raises what its client saw
        self._pool.shutdown()


def test_streams_survive_a_node(port):
    """One replica on each of two nodes.  A node is killed as a whole, and another one comes."""
    with cluster() as made:
        nodes = [made.add_node(num_cpus=1, resources={"engine": 1}) for _ in range(2)]
        layout = fleet.Fleet(TABLES, replicas=2, slots=fleets.SLOTS, queue=1000, cpus=0.1,
                             resources={"engine": 1}, patience=300)  # fmt: skip
        with fleet.running(layout, port=port):
            assert ray.available_resources().get("engine", 0) == 0  # one on each node
            streams = Streams(port, lambda number: fleets.request((7 << 32) + number), 12)
            for _ in range(6):
                waited(lambda: serving() == 2)
                streams.flow()
                made.remove_node(nodes.pop(0), allow_graceful=False)
                waited(lambda: serving() == 1)
                nodes.append(made.add_node(num_cpus=1, resources={"engine": 1}))
                streams.flow()
                if counts(port)["resumed"]:
                    break
            streams.close()
            figures = counts(port)
    assert figures["resumed"] and not figures["lost"]
    with TABLES() as alone:
        assert streams.got == fleets.alone(alone, streams.asked)


def test_replicas_follow_the_load(port):
    """One, then two while more requests run and wait than one has slots, then one again."""
    layout = fleet.Fleet(TABLES, replicas=1, most=2, grow=1, shrink=3, slots=fleets.SLOTS,
                         queue=1000, cpus=0.1)  # fmt: skip
    with fleet.running(layout, port=port):
        assert serving() == 1
        many = Streams(port, lambda number: fleets.request((8 << 32) + number), 16)
        waited(lambda: serving() == 2)
        one = Streams(port, lambda number: fleets.request((9 << 32) + number), 1)
        many.close()
        waited(lambda: serving() == 1)
        one.close()
        assert not counts(port)["lost"]
    asked, got = many.asked + one.asked, many.got + one.got
    with TABLES() as alone:
        assert got == fleets.alone(alone, asked)


def ask(number: int) -> tuple[str, dict[str, Any]]:
    body = {"prompt": "def main(" + "x" * (number % 5), "max_tokens": 60, "seed": number, "n": 1,
            "ignore_eos": True, "temperature": 1.0,
            "speculation": {"drafter": ("none", "lookup")[number % 2]}}  # fmt: skip
    return "/v1/completions", body


def test_a_slice_is_one_replica(port, monkeypatch):
    """Two slices of two hosts, as Ray sees TPUs, with a device of the CPU on each.  A process of
    one slice is killed: its streams go on at the other slice, and the first is used again."""
    for name, value in environment(1, 2).items():
        monkeypatch.setenv(name, value)
    with cluster() as made:
        for name in ("one", "two"):
            monkeypatch.setenv("TPU_NAME", name)  # Ray reads it on the first host of a slice
            for number in range(2):
                labels = {"ray.io/tpu-slice-name": name, "ray.io/tpu-worker-id": str(number),
                          "ray.io/tpu-pod-type": "v4-16"}  # fmt: skip
                head = {"TPU-v4-16-head": 1} if number == 0 else {}
                made.add_node(num_cpus=2, labels=labels, resources={"TPU": 4, **head})
        layout = fleet.Fleet(together.spread, replicas=2, slots=4, queue=1000, patience=300,
                             slice=fleet.Slice("v4", "2x2x2"))  # fmt: skip
        with fleet.running(layout, port=port):
            assert len(fleets.own_processes("ray::Host")) == 4
            assert ray.available_resources().get("TPU", 0) == 0
            streams = Streams(port, ask, 6)
            for turn in range(6):
                waited(lambda: serving() == 2)
                streams.flow()
                there = sorted(fleets.own_processes("ray::Host"))
                os.kill(there[turn % len(there)], signal.SIGKILL)
                waited(lambda: serving() < 2)
                streams.flow()
                if counts(port)["resumed"]:
                    break
            waited(lambda: serving() == 2)
            streams.close()
            figures = counts(port)
    assert figures["resumed"] and not figures["lost"]
    with together.spread(1) as alone:
        assert streams.got == fleets.alone(alone, streams.asked)


def test_a_client_that_leaves_ends_no_slice(monkeypatch):
    """Ray cancels what a cancelled call has called, so the call on a host ends with an error."""
    from ray.exceptions import TaskCancelledError  # pyright: ignore[reportMissingImports]

    from specjax.serve.fleet import slices

    async def cancelled() -> bytes:
        raise TaskCancelledError

    async def parts() -> AsyncIterator[Any]:
        yield cancelled()

    ended = []
    monkeypatch.setattr(slices.os, "_exit", ended.append)
    monkeypatch.setattr(slices.ray, "cancel", lambda parts: None)
    replica = object.__new__(slices.SliceReplica)
    replica.hosts = [mock.Mock()]
    replica.hosts[0].answer.options.return_value.remote.return_value = parts()

    async def read() -> None:
        async for _ in replica.answer(fleet.Call("GET", "/live", {})):
            pass

    with pytest.raises(TaskCancelledError):
        asyncio.run(read())
    assert not ended
