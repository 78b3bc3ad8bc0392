"""python -m bench.fleet: two replicas beside one, and a fleet beside a server without it.

    server       specjax serve                       bound to one core
    two servers  the same twice                      each bound to a core of its own, without Ray
    one          specjax serve --replicas 1 --pin    its replica bound to the same core
    two          specjax serve --replicas 2 --pin    each replica bound to a core of its own

The time between tokens is that of one stream at a time, from its first event to its last, in turns
between server and fleet.  The throughput is that of as many texts as slots, as streams and as whole
answers.  Two servers over one are what the machine allows: both cores share one memory.  Clients,
proxy and ingress share the cores with the engines, as on a laptop, and the last rows say how much
of a core they take.  It needs the extra `ray` and two cores.
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
from collections.abc import Callable, Iterator
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
    size: str | None = option(
        None, "random weights of this size in its place", choices=("tiny", "15m", "110m")
    )
    dtype: str | None = option(None, "of the weights, as for serve; default: float32")
    folder: str = option("runs/bench-weights", "where they are kept")
    slots: int = count(4, "slots of an engine")
    new_tokens: int = count(200, "tokens of a text")
    requests: int = count(40, "texts of a throughput of one engine; of two it is twice as many")
    rounds: int = count(7, "turns of server and fleet, one stream each")
    port: int = option(8471, "the first of five ports")
    json: str | None = option(None, "write the figures to this file, too")


def main(argv: list[str] | None = None) -> None:
    options = parse(FleetOptions, argv, (__doc__ or "").split("\n")[0], "python -m bench.fleet")
    cores = sorted(os.sched_getaffinity(0))
    settle((len(cores) < 2, f"there is {len(cores)} core, and each of two replicas needs its own"))
    if options.size is not None:
        made, _ = random_folders(options.size, 32_000, pathlib.Path(options.folder), "float32")
        options = dataclasses.replace(options, target=str(made))
    figures: dict[str, float] = {}
    with _serving(options, 0, cores[:1]) as server:
        with _serving(options, 1, cores, "--replicas", "1", "--pin") as one:
            _between(figures, {"server": server[0], "fleet": one[0]}, options)
            _throughputs(figures, "one replica", [one], options)
        _throughputs(figures, "server", [server], options)
        with _serving(options, 3, cores[1:2]) as second:
            _throughputs(figures, "two servers", [server, second], options)
    with _serving(options, 2, cores, "--replicas", "2", "--pin") as two:
        _throughputs(figures, "two replicas", [two], options, engines=2)
    for kind in _KINDS:
        for more, less in (("two servers", "server"), ("two replicas", "one replica")):
            ratio = figures[f"tokens/s, {kind}, {more}"] / figures[f"tokens/s, {kind}, {less}"]
            figures[f"{more} over {less}, {kind}"] = ratio
    print("| | |\n|---|---|")
    for name, value in figures.items():
        print(f"| {name} | {value:.3g} |" if value < 100 else f"| {name} | {value:.0f} |")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({**dataclasses.asdict(options), "figures": figures}, file, indent=2)


def _between(figures: dict[str, float], ports: dict[str, int], options: FleetOptions) -> None:
    """Adds the time between two tokens of one stream at a time, in turns."""
    times: dict[str, list[float]] = {name: [] for name in ports}
    for number in range(options.rounds + 1):
        for name, port in ports.items():
            between = _stream(port, options, number)[1]
            times[name].extend([between] if number else [])  # the first one warms up
    for name, taken in times.items():
        figures[f"between tokens, {name}, ms"] = 1000 * statistics.median(taken)
    server, fleet = (statistics.median(taken) for taken in times.values())
    figures["cost of the fleet"] = fleet / server - 1


@contextlib.contextmanager
def _serving(
    options: FleetOptions, number: int, cores: list[int], *more: str
) -> Iterator[tuple[int, int]]:
    """Runs a server on some cores, and yields its port and its process."""
    port = options.port + number
    command = [
        sys.executable, "-m", "specjax", "serve", "--port", str(port), "--default", "none",
        "--no-lookup", "--slots", str(options.slots), "--capacity", "512", "--logprobs", "-1",
        "--constraint-size", "0", "0", "--waiting", "10000", *more,
    ]  # fmt: skip
    command += ["--target", options.target] if options.target else []
    command += ["--dtype", options.dtype] if options.dtype else []
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
        yield port, process.pid
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


def _whole(port: int, options: FleetOptions, seed: int) -> int:
    """Returns the tokens of an answer that does not stream."""
    body = {"prompt": [5, 6, 7], "max_tokens": options.new_tokens, "seed": seed,
            "ignore_eos": True, "temperature": 1.0}  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return len(answer["choices"][0]["token_ids"])


_KINDS: dict[str, Callable[[int, FleetOptions, int], int]] = {
    "streams": lambda *given: _stream(*given)[0], "whole answers": _whole,
}  # fmt: skip


def _throughputs(
    figures: dict[str, float], name: str, servers: list[tuple[int, int]], options: FleetOptions,
    engines: int = 0,
) -> None:  # fmt: skip
    """Adds the tokens per second of many texts, and the share of a core that each part takes."""
    engines = engines or len(servers)
    for kind, ask in _KINDS.items():

        def one(number: int, ask: Any = ask) -> int:
            return ask(servers[number % len(servers)][0], options, number)

        clients = engines * options.slots
        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            list(pool.map(one, range(clients)))  # warms up
            before, began = _seconds(servers), time.perf_counter()
            tokens = sum(pool.map(one, range(engines * options.requests)))
            taken, after = time.perf_counter() - began, _seconds(servers)
        figures[f"tokens/s, {kind}, {name}"] = tokens / taken
        for part, spent in after.items():
            if (share := (spent - before.get(part, 0.0)) / taken) >= 0.005:
                figures[f"cores, {kind}, {name}: {part}"] = share


_PARTS = {
    "ray::ServeReplica:specjax:replicas": "engines", "ray::ServeReplica:specjax:ingress": "ingress",
    "ray::Proxy": "proxy",
}  # fmt: skip


def _seconds(servers: list[tuple[int, int]]) -> dict[str, float]:
    """Returns the seconds of CPU of each part of the servers so far, and of the clients."""
    own = os.times()
    made = {"clients": own.user + own.system}
    parents, spent, names = {}, {}, {}
    for folder in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            number = int(folder.name)
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[number] = int(fields[1])
            spent[number] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            names[number] = (folder / "cmdline").read_bytes().decode()
    for number, seconds in spent.items():
        above = number
        while above in parents and all(above != process for _, process in servers):
            above = parents[above]
        if above in parents:
            alone = "engines" if above == number else "Ray"  # a server is one process
            found = [part for start, part in _PARTS.items() if names[number].startswith(start)]
            part = found[0] if found else alone
            made[part] = made.get(part, 0.0) + seconds
    return made


if __name__ == "__main__":
    run(main)
