"""python -m bench.fleet: two replicas beside one, and a fleet beside a server without it.

    server   specjax serve                       bound to one core
    one      specjax serve --replicas 1 --pin    its replica bound to the same core
    two      specjax serve --replicas 2 --pin    each replica bound to a core of its own

The time between tokens is that of one stream at a time, from its first event to its last, in turns
between server and fleet.  The throughput is that of as many streams as slots.  Clients, proxy and
ingress share the cores with the engines, as on a laptop.  It needs the extra `ray` and two cores.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from bench.command import run
from bench.weights import random_folders
from specjax._internal.checks import settle
from specjax.options.command import parse
from specjax.options.fields import Options, count, option

_PATIENCE = 900  # seconds until a server has started


@dataclasses.dataclass(frozen=True)
class FleetOptions(Options):
    """What is served, and how often it is measured."""

    group = "fleet"

    target: str | None = option(None, "folder of the target; default: the shipped one")
    size: str | None = option(None, "random weights of this size in its place", choices=("110m",))
    folder: str = option("runs/bench-weights", "where they are kept")
    slots: int = count(4, "slots of an engine")
    new_tokens: int = count(200, "tokens of a text")
    requests: int = count(40, "streams of a throughput")
    rounds: int = count(7, "turns of server and fleet, one stream each")
    port: int = option(8471, "the first of three ports")
    json: str | None = option(None, "write the figures to this file, too")


def main(argv: list[str] | None = None) -> None:
    options = parse(FleetOptions, argv, (__doc__ or "").split("\n")[0], "python -m bench.fleet")
    cores = sorted(os.sched_getaffinity(0))
    settle((len(cores) < 2, f"there is {len(cores)} core, and each of two replicas needs its own"))
    if options.size is not None:
        made, _ = random_folders(options.size, 32_000, pathlib.Path(options.folder), "float32")
        options = dataclasses.replace(options, target=str(made))
    figures: dict[str, float] = {}
    with (
        _serving(options, 0, cores[:1]) as server,
        _serving(options, 1, cores, "--replicas", "1", "--pin") as one,
    ):
        times: dict[int, list[float]] = {server: [], one: []}
        for number in range(options.rounds + 1):
            for port, taken in times.items():
                between = _stream(port, options, number)[1]
                taken.extend([between] if number else [])  # the first one warms up
        figures["between tokens, server, ms"] = 1000 * statistics.median(times[server])
        figures["between tokens, fleet, ms"] = 1000 * statistics.median(times[one])
        figures["tokens/s, server"] = _throughput(server, options, options.slots)
        figures["tokens/s, one replica"] = _throughput(one, options, options.slots)
    with _serving(options, 2, cores, "--replicas", "2", "--pin") as two:
        figures["tokens/s, two replicas"] = _throughput(two, options, 2 * options.slots)
    server_time = figures["between tokens, server, ms"]
    figures["cost of the fleet"] = figures["between tokens, fleet, ms"] / server_time - 1
    both = figures["tokens/s, two replicas"]
    figures["two replicas over one"] = both / figures["tokens/s, one replica"]
    print("| | |\n|---|---|")
    for name, value in figures.items():
        print(f"| {name} | {value:.3g} |" if value < 100 else f"| {name} | {value:.0f} |")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({**dataclasses.asdict(options), "figures": figures}, file, indent=2)


@contextlib.contextmanager
def _serving(options: FleetOptions, number: int, cores: list[int], *more: str) -> Iterator[int]:
    """Runs a server on some cores, and yields its port."""
    port = options.port + number
    command = [
        sys.executable, "-m", "specjax", "serve", "--port", str(port), "--default", "none",
        "--no-lookup", "--slots", str(options.slots), "--capacity", "512", "--logprobs", "-1",
        "--constraint-size", "0", "0", "--waiting", "10000", *more,
    ]  # fmt: skip
    command += ["--target", options.target] if options.target else []
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)  # the child has its parent's
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.sched_setaffinity(0, own)
    try:
        until = time.monotonic() + _PATIENCE
        while not _ready(port):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{' '.join(command)} did not start")
            time.sleep(0.2)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()


def _ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _stream(port: int, options: FleetOptions, seed: int) -> tuple[int, float]:
    """Returns the tokens of a stream, and the mean seconds between two after the first event."""
    body: dict[str, Any] = {
        "prompt": [5, 6, 7], "max_tokens": options.new_tokens, "stream": True, "seed": seed,
        "ignore_eos": True, "temperature": 1.0,
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body))
    tokens, first, began, last = 0, 0, 0.0, 0.0
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            choices = json.loads(line[6:])["choices"]
            new = len(choices[0].get("token_ids", ())) if choices else 0
            if new:
                last = time.perf_counter()
                began, first = (began, first) if tokens else (last, new)
                tokens += new
    connection.close()
    return tokens, (last - began) / max(1, tokens - first)


def _throughput(port: int, options: FleetOptions, clients: int) -> float:
    """Returns the tokens per second of many streams."""
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        list(pool.map(lambda seed: _stream(port, options, seed), range(clients)))  # warms up
        began = time.perf_counter()
        made = pool.map(lambda seed: _stream(port, options, seed), range(options.requests))
        return sum(tokens for tokens, _ in made) / (time.perf_counter() - began)


if __name__ == "__main__":
    run(main)
