"""python -m bench.packed: products of few rows with packed matrices, beside other engines.

The matrices of a model's MLPs are multiplied one after the other: by specjax, by OpenVINO, and by
llama.cpp, each in turn in every round, with as many threads as this process may use.  The weights
are random.  In int4 specjax and OpenVINO have groups of 128 inputs, and llama.cpp has Q4_0 (32).
In int8 specjax and OpenVINO have a scale for each output, and llama.cpp has Q8_0.

Activations are float32 in `int4`, `nvfp4`, `int8-packed` and `fp8`, as in a packed folder, and in
the engine `openvino-float`.  They are rounded to 8 bits in `int4-rounded` and `int8-rounded`, as
`load(activations="int8")` does; in `int8`, as `specjax.quantise` does; and in `openvino` and
`llama.cpp`, whose default that is.  The last column names the faster engine of the same kind.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bench.command import Report, run
from bench.compiled.formats import FORMATS
from bench.peers.engines import interpreter
from bench.peers.products import ENGINES, RUNS
from bench.report import ratio
from specjax.files import rounded, rounded_leaf
from specjax.measure import describe, show
from specjax.models import Int8, cpu_dot_general, cpu_int8_dot_general
from specjax.options import fields
from specjax.options.command import parse

SIZES = {"tiny": (128, 256, 2), "110m": (768, 2048, 12), "1b": (2048, 8192, 6)}
"""Hidden size, MLP size and layers; each layer has two matrices."""

CODES = {
    "int4": 4, "int4-rounded": 4, "nvfp4": 4, "int8": 8, "int8-packed": 8, "int8-rounded": 8,
    "fp8": 8,
}  # fmt: skip
"""The bits of each, which decide what the other engines multiply."""

_IN_FLOAT = "int4", "nvfp4", "int8-packed", "fp8", "openvino-float"
"""Codes and engines whose activations are not rounded."""

_LAST = (((1,), (0,)), ((), ()))


@dataclasses.dataclass(frozen=True)
class PackedOptions(fields.Options):
    """The options of `python -m bench.packed`."""

    sizes: tuple[str, ...] = fields.option(("110m",), "of the matrices", choices=tuple(SIZES))
    codes: tuple[str, ...] = fields.option(tuple(CODES), "of the weights", choices=tuple(CODES))
    rows: tuple[int, ...] = fields.option((1, 4, 5, 8, 16), "of the activations")
    rounds: int = fields.option(15, "measured turns")
    engines: tuple[str, ...] = fields.option((), "that take part", choices=tuple(ENGINES))
    engine_python: str | None = fields.option(
        None, "the interpreter that has openvino or xllamacpp"
    )
    json: str | None = fields.option(None, "write the rows to this file")

    def __post_init__(self) -> None:
        super().__post_init__()
        fields.inside(self, "[1, inf)", "rounds")
        if min(self.rows) < 1:
            raise ValueError(f"--rows is {min(self.rows)}; it must be at least 1")


class Peer(Protocol):
    """What is measured beside specjax."""

    name: str

    def seconds(self, key: tuple[int, ...]) -> float:
        """Returns those of a chain: hidden size, MLP size, layers, bits and rows."""
        ...


class Engine:
    """A process that runs chains of products."""

    def __init__(self, name: str, python: str) -> None:
        self.name = name
        threads = str(len(os.sched_getaffinity(0)))
        root = str(pathlib.Path(__file__).parent.parent)
        self._process = subprocess.Popen(
            [python, "-m", "bench.peers.products", name, threads],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": root},
        )
        said = self._read()
        if "error" in said:
            self.close()
            raise ValueError(
                f"the engine {name} does not run under {python}: {said['error']}. Install openvino "
                "and xllamacpp in an environment, and name its interpreter by --engine-python"
            )
        self.version: str = said["version"]

    def seconds(self, key: tuple[int, ...]) -> float:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(key) + "\n")
        self._process.stdin.flush()
        said = self._read()
        if "error" in said:
            raise ValueError(f"the engine {self.name} stopped: {said['error']}")
        return min(said["seconds"])

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _read(self) -> Report:
        assert self._process.stdout
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": "its process ended; its message is above"}


def ours(hidden: int, mlp: int, layers: int, codes: str, rows: int) -> Callable[[], float]:
    """Returns a function that gives the seconds of a chain of products of specjax."""
    rng, matrices = np.random.default_rng(0), []
    for _ in range(layers):
        for inputs, outputs in ((hidden, mlp), (mlp, hidden)):
            wide = (rng.normal(size=(inputs, outputs)) / np.sqrt(inputs)).astype(np.float32)
            if codes == "int8":
                matrices.append(Int8.quantise(jnp.asarray(wide)))
                continue
            bits = CODES[codes]

            def to(matrix: np.ndarray, bits: int = bits):
                if codes in ("fp8", "nvfp4"):
                    return FORMATS[codes](np.zeros_like(matrix))
                return rounded(matrix, bits, None if bits == 4 else matrix.shape[-1])

            matrix = rounded_leaf(wide, True, None, "cpu", to)
            matrices.append(dataclasses.replace(matrix, rounds=codes.endswith("rounded")))

    @jax.jit
    def multiply(x: Array, matrices: list) -> Array:
        product = cpu_int8_dot_general if codes == "int8" else cpu_dot_general
        for matrix in matrices:
            x = product(x, matrix.unbox(), _LAST)
        return x

    x = jnp.ones((rows, hidden), jnp.float32)
    multiply(x, matrices).block_until_ready()

    def seconds() -> float:
        found = []
        for _ in range(RUNS):
            started = time.perf_counter()
            multiply(x, matrices).block_until_ready()
            found.append(time.perf_counter() - started)
        return min(found)

    return seconds


def measured(options: PackedOptions, engines: Sequence[Peer]) -> list[Report]:
    """Returns a row for each size, codes and number of rows."""
    rows = []
    for size in options.sizes:
        for codes in options.codes:
            for count in options.rows:
                mine, key = ours(*SIZES[size], codes, count), (*SIZES[size], CODES[codes], count)
                found: dict[str, list[float]] = {
                    name: [] for name in ("specjax", *(engine.name for engine in engines))
                }
                for _ in range(options.rounds):
                    found["specjax"].append(mine())
                    for engine in engines:
                        found[engine.name].append(engine.seconds(key))
                rows.append({"size": size, "codes": codes, "rows": count, "seconds": found})
                alike = [
                    engine.name
                    for engine in engines
                    if (engine.name in _IN_FLOAT) == (codes in _IN_FLOAT)
                ]
                fastest = min(
                    alike,
                    key=lambda name: statistics.median(found[name]),
                    default=None,
                )
                rows[-1]["fastest"] = fastest
                rows[-1]["over_fastest"] = (
                    ratio([found[fastest]], [found["specjax"]]) if fastest else None
                )
                print(line(rows[-1]), flush=True)
    return rows


def line(row: Report) -> str:
    """Returns a line of the table."""
    times = [f"{1e3 * statistics.median(seconds):.2f}" for seconds in row["seconds"].values()]
    cells = [row["size"], row["codes"], str(row["rows"]), *times]
    over = f"{show(row['over_fastest'], '.2f')} {row['fastest'] or ''}".strip()
    return f"| {' | '.join([*cells, over])} |"


def main(argv: list[str] | None = None) -> None:
    options = parse(PackedOptions, argv, __doc__, "python -m bench.packed")
    python = interpreter(options.engine_python)
    engines: list[Engine] = []
    try:
        for name in options.engines:
            engines.append(Engine(name, python))
        head = describe()
        versions = "".join(f", {engine.name} {engine.version}" for engine in engines)
        threads = len(os.sched_getaffinity(0))
        print(f"{head['processor']}, {threads} threads, jax {head['jax']}{versions}, milliseconds")
        names = [engine.name for engine in engines]
        columns = ["size", "codes", "rows", "specjax", *names, "specjax over the faster"]
        print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
        rows = measured(options, engines)
    finally:
        for engine in engines:
            engine.close()
    if options.json:
        report = {"machine": head, "options": vars(options), "rows": rows}
        pathlib.Path(options.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    run(main)
