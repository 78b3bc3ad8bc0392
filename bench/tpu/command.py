"""python -m bench.tpu: what a step of specjax would move on TPUs, without a TPU.

It compiles the decoding loop with libtpu for chips that are not there, and counts bytes in the
optimised program.  It needs an environment of its own:

    python3 -m venv .venv-tpu && .venv-tpu/bin/pip install "jax[tpu]" -e ".[plot]"
    .venv-tpu/bin/python -m bench.tpu --size 1b --chip v5e --batch 1 8
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

import specjax
from bench.command import run
from bench.tpu.chips import CHIPS, chip
from bench.tpu.flops import product_flops
from bench.tpu.hlo import parse
from bench.tpu.programs import (
    DRAFT_OF,
    DRAFTERS,
    SIZES,
    Compiled,
    compile_loop,
    devices_of,
    model_of,
    prepare_environment,
    shapes_of,
)
from bench.tpu.roofline import table
from bench.tpu.traffic import KINDS, host_transfers, traffic
from specjax import Decoder, Params
from specjax.models import BLOCK_SLOTS, TransformerConfig
from specjax.plot import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cell = dict[str, Any]
"""A row of the report, as JSON holds it."""


def main(argv: list[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    if arguments.plot:
        new_figure()  # fails before the work, not after it, if matplotlib is missing
    if not all(0 <= alpha <= 1 for alpha in arguments.alpha):
        raise ValueError(f"--alpha is {arguments.alpha}; acceptance rates lie in [0, 1]")
    for name in ("batch", "capacity", "chips", "filled"):
        given = getattr(arguments, name)
        if given is not None and np.min(given) < 1:
            raise ValueError(f"--{name} is {np.min(given)}; it must be at least 1")
    others = [chip(name) for name in dict.fromkeys([*arguments.chip, *arguments.also])]
    targets = {size: SIZES[size] for size in arguments.size}
    if arguments.target_config:
        targets = {pathlib.Path(arguments.target_config).stem: _config(arguments.target_config)}
    slices = {
        (name, count): devices_of(chip(name), count)
        for name in arguments.chip
        for count in arguments.chips
    }
    cells: list[Cell] = []
    print(_HEADER, flush=True)
    cases = [
        (size, drafter, batch, capacity, where)
        for size in targets
        for drafter in arguments.drafter
        for batch in arguments.batch
        for capacity in arguments.capacity
        for where in slices
    ]
    for size, drafter, batch, capacity, (name, count) in cases:
        print(f"compiling {size}, {drafter}, batch {batch}, {count} x {name}", file=sys.stderr)
        has_draft, make = DRAFTERS[drafter]
        draft = model_of(SIZES[arguments.draft or DRAFT_OF.get(size, "150m")])
        target = model_of(targets[size])
        decoder = Decoder(target, make(draft), specjax.Match(), (2,), capacity)
        params = Params(shapes_of(target), shapes_of(draft) if has_draft else None)
        split = draft if has_draft and arguments.split_draft else None
        compiled = compile_loop(decoder, params, slices[name, count], batch, split)
        filled = min(arguments.filled or capacity, capacity)
        # None for a tree: siblings are no independent chances.
        proposer = decoder.proposer
        lookahead = proposer.max_depth if proposer.is_chain else None
        cells.append(
            {
                "size": size, "drafter": drafter, "chip": name, "chips": count, "batch": batch,
                "capacity": capacity, "filled": filled, "lookahead": lookahead,
                **measure(compiled, target.vocab_size, count, chip(name).memory, filled),
            }
        )  # fmt: skip
        print(_line(cells[-1]), flush=True)
        if arguments.keep:
            folder = pathlib.Path(arguments.keep)
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{size}-{drafter}-{count}x{name}-{batch}-{capacity}.txt"
            path.write_text(compiled.text)
        if arguments.json:  # after each cell: the next one may fail
            pathlib.Path(arguments.json).write_text(json.dumps(cells, indent=1))
        if arguments.plot:
            draw(cells).savefig(arguments.plot)
    print(f"\n{_LEAST}\n\n{table(cells, others, tuple(arguments.alpha))}")


_LEAST = (
    "Least milliseconds of a step, by the chips' published figures and these bytes, and the "
    "speed-up over no drafts on the first chip, at an acceptance rate."
)


def measure(compiled: Compiled, vocab_size: int, chips: int, memory: float, filled: int) -> Cell:
    """What a cell of the report says of a program, for each chip.

    Args:
      compiled: the program.
      vocab_size: of the target.
      chips: of the mesh.
      memory: bytes of a chip.
      filled: tokens of the longest row.
    """
    program, blocks = parse(compiled.text), -(-filled // BLOCK_SLOTS)
    counted = traffic(program, (vocab_size, -(-vocab_size // chips)), blocks)
    needed = compiled.argument_bytes + compiled.scratch_bytes
    collectives = [
        {"kind": kind, "bytes": size, "count": number}
        for (kind, size), number in sorted(counted.collectives.items())
    ]
    return {
        "bytes_per_step": {kind: counted.bytes[kind] for kind in KINDS},
        "bytes_by_phase": {name: dict(kinds) for name, kinds in counted.by_phase.items()},
        "flops": product_flops(
            compiled.decoder.step, compiled.params, compiled.state, blocks=blocks
        )
        // chips,
        "collectives": collectives,
        "host_transfers": host_transfers(program),
        "copies": [{"argument": path, "bytes": size} for path, size in counted.copies],
        "argument_bytes": compiled.argument_bytes,
        "scratch_bytes": compiled.scratch_bytes,
        "predicted_bytes": compiled.predicted_bytes,
        "fits": needed <= memory,
        "missing_bytes": max(0, needed - int(memory)),
        "compile_seconds": compiled.seconds,
    }


_COLUMNS = (
    "size", "drafter", "chips", "batch", "capacity", "weights", "cache read", "written", "copied",
    "logits", "collectives", "other", "GFLOP", "all-reduces", "arguments", "scratch", "predicted",
    "fits", "compiled in",
)  # fmt: skip
_HEADER = (
    "Megabytes per chip and step; arguments, scratch and the prediction in gigabytes.\n\n"
    f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}"
)


def _line(cell: Cell) -> str:
    moved = [f"{cell['bytes_per_step'][kind] / 1e6:.1f}" for kind in KINDS]
    counts = Counter[str]()
    for entry in cell["collectives"]:
        counts[entry["kind"]] += entry["count"]
    others = [f"{number} {kind}" for kind, number in counts.items() if kind != "all-reduce"]
    memory = [cell[f"{name}_bytes"] / 1e9 for name in ("argument", "scratch", "predicted")]
    fits = "yes" if cell["fits"] else f"no, {cell['missing_bytes'] / 1e9:.1f} GB too much"
    entries = [
        cell["size"], cell["drafter"], f"{cell['chips']} x {cell['chip']}", cell["batch"],
        cell["capacity"], *moved, f"{cell['flops'] / 1e9:.1f}",
        ", ".join([str(counts["all-reduce"]), *others]), *(f"{size:.2f}" for size in memory), fits,
        f"{cell['compile_seconds']:.0f} s",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, entries))} |"


def draw(cells: list[Cell]) -> Figure:
    """A bar for each cell: the bytes of a step, stacked by kind."""
    figure = new_figure(10, 1.5 + 0.35 * len(cells))
    axes = figure.add_subplot()
    names = [
        f"{cell['size']} {cell['drafter']}, {cell['chips']} x {cell['chip']}, "
        f"batch {cell['batch']}, {cell['capacity']}"
        for cell in cells
    ]
    places, left = range(len(cells)), [0.0] * len(cells)
    for number, kind in enumerate(KINDS):
        sizes = [cell["bytes_per_step"][kind] / 1e9 for cell in cells]
        axes.barh(places, sizes, left=left, label=kind.replace("_", " "), color=f"C{number}")
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlabel("gigabytes per chip and step")
    axes.legend(fontsize=8)
    figure.tight_layout()
    return figure


def _config(path: str) -> TransformerConfig:
    """Of a `config.json`, or of the folder with it."""
    from specjax.files import read_config

    given = pathlib.Path(path)
    folder = given if given.is_dir() else given.parent
    if not (folder / "config.json").is_file() or given not in (folder, folder / "config.json"):
        raise ValueError(f"--target-config {path} is no config.json, and no folder with one")
    return read_config(folder)[2]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.tpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--size", nargs="+", choices=sorted(SIZES), default=["1b"], help="targets")
    made.add_argument("--target-config", help="a config.json (or its folder) instead of a size")
    made.add_argument("--draft", choices=sorted(SIZES), help="size of the draft model")
    made.add_argument(
        "--split-draft", action="store_true", help="split the draft model too; default: every "
        "chip holds all of it"
    )  # fmt: skip
    made.add_argument("--chip", nargs="+", default=["v5e"], help=f"of {', '.join(CHIPS)}")
    made.add_argument("--chips", nargs="+", type=int, default=[1], help="in one mesh")
    made.add_argument("--drafter", nargs="+", choices=sorted(DRAFTERS), default=["none", "draft"])
    made.add_argument("--batch", nargs="+", type=int, default=[1], help="rows")
    made.add_argument("--capacity", nargs="+", type=int, default=[1024], help="tokens of a row")
    made.add_argument("--filled", type=int, help="tokens of the longest row; default: the capacity")
    made.add_argument("--also", nargs="*", default=[], help="predict these chips by the same bytes")
    made.add_argument("--alpha", nargs="*", type=float, default=[0.6, 0.8], help="acceptance rates")
    made.add_argument("--json", help="write the list of cells to this file")
    made.add_argument("--plot", help="draw the bytes of a step to this file")
    made.add_argument("--keep", help="write the optimised programs to this folder")
    return made


def entry() -> None:
    prepare_environment()
    run(main)
