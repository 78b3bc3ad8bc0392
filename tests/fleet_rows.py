"""Rows that workers of Ray Data write while they are killed: the texts must be one process's.

    PYTHONPATH=tests python -m tests.fleet_rows --rows 10000 --kills 20 --workers 2

It needs the extra `ray`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import signal
import tempfile
import threading
import time
from typing import Any

import load
import serving
from fleets import own_processes, words

from specjax.serve import Engine, RowWriter, write_texts
from specjax.serve.fleet import RayPool

HERE = pathlib.Path(__file__).parent


def writer() -> RowWriter:
    """The table model, whose programs compile at once."""
    target, _ = serving.models()
    drafters = {"lookup": serving.drafters()["lookup"]}
    engine = Engine(target, drafters, slots=8, capacity=load.CAPACITY, chunk=load.CHUNK, waiting=16)
    return RowWriter(engine, {"max_new_tokens": 24, "temperature": 1.0, "eos": []}, 7)


def rows(count: int) -> list[dict[str, Any]]:
    source = words()
    return [
        {"row": f"line {number}", "prompt": source[number % 3000 :][: 4 + number % 60]}
        for number in range(count)
    ]


def campaign(*, count: int, kills: int, workers: int, every: float, part: int) -> dict[str, int]:
    """Writes the rows with workers and alone; returns counts."""
    asked, killed, ended = rows(count), [], threading.Event()
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)

    def killing() -> None:
        while len(killed) < kills and not ended.wait(every):
            there = own_processes("ray::MapWorker", "ray::_MapWorker", "ray::MapBatches")
            if there:
                chosen = sorted(there)[len(killed) % len(there)]
                os.kill(chosen, signal.SIGKILL)
                killed.append(chosen)

    with tempfile.TemporaryDirectory() as folder:
        out, alone = pathlib.Path(folder, "several.jsonl"), pathlib.Path(folder, "one.jsonl")
        thread = threading.Thread(target=killing)
        thread.start()
        began = time.perf_counter()
        write_texts(out, asked, "run", writer, RayPool(workers, cpus=0.5), part)
        ended.set()
        thread.join()
        seconds = time.perf_counter() - began
        write_texts(alone, asked, "run", functools.lru_cache(writer), part=10_000)
        several, one = (
            [json.loads(line) for line in path.read_text().splitlines()[1:]]
            for path in (out, alone)
        )
        assert [row["row"] for row in one] == [row["row"] for row in asked]
        differences = sum(a != b for a, b in zip(several, one, strict=True))
    return {
        "rows": count, "workers killed": len(killed), "differences": differences,
        "seconds": round(seconds),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two kills")
    parser.add_argument("--part", type=int, default=50, help="rows that a worker gets at once")
    asked = vars(parser.parse_args(argv))
    counts = campaign(count=asked.pop("rows"), **asked)
    print(counts)
    assert counts["differences"] == 0
    assert counts["workers killed"], "no worker was killed: pass a smaller --every"


if __name__ == "__main__":
    main()
