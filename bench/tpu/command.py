"""python -m bench.tpu: what a step of specjax would move on TPUs, without a TPU.

It compiles the decoding loop with libtpu for chips that are not there, and counts bytes in the
optimised program.  It needs an environment of its own:

    python3 -m venv .venv-tpu && .venv-tpu/bin/pip install "jax[tpu]" -e ".[plot]"
    .venv-tpu/bin/python -m bench.tpu --size 1b --chip v5e --batch 1 8
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import sys

import numpy as np

import specjax
from bench.command import run
from bench.machine import ceilings
from bench.tpu.best import best
from bench.tpu.cells import HEADER, Cell, draw, line, measure
from bench.tpu.chips import CHIPS, Chip, chip
from bench.tpu.drafters import DRAFTERS
from bench.tpu.extrapolated import extrapolated
from bench.tpu.measured import beside
from bench.tpu.programs import compile_loop, devices_of, prepare_environment
from bench.tpu.published import compare
from bench.tpu.roofline import table
from bench.tpu.sizes import DRAFT_OF, DTYPES, SIZES, TARGETS, VOCABULARY, config_of, shapes_of
from specjax import Decoder, Params
from specjax.models import TransformerConfig
from specjax.options import fields
from specjax.options.command import parse
from specjax.plot import new_figure


def main(argv: list[str] | None = None) -> None:
    arguments = parse(TpuOptions, argv, __doc__, "python -m bench.tpu")
    if arguments.plot:
        new_figure()  # fails before the work, not after it, if matplotlib is missing
    if not all(0 <= alpha <= 1 for alpha in arguments.alpha):
        raise ValueError(f"--alpha is {[*arguments.alpha]}; acceptance rates lie in [0, 1]")
    for name in ("batch", "capacity", "chips", "filled", "vocab_size"):
        given = getattr(arguments, name)
        if given is not None and np.min(given) < 1:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is {np.min(given)}; it must be at least 1")
    if arguments.layers and not (
        len(arguments.layers) == 2 and 1 <= arguments.layers[0] < arguments.layers[1]
    ):
        raise ValueError(
            f"--layers is {[*arguments.layers]}; it must be two numbers of layers, the smaller one "
            "first, of at least 1"
        )
    alphas = dict(map(_expected, arguments.expect))
    others = [_chip(name, arguments.dtype) for name in [*arguments.chip, *arguments.also]]
    cells = [cell for path in arguments.read for cell in _read(path)]
    if arguments.measure:
        asked = (
            [(cell["size"], cell["chips"]) for cell in cells]
            if arguments.read
            else [
                (arguments.target_config or size, count)
                for size in arguments.size
                for count in arguments.chips
            ]
        )
        for size, count in asked:
            if size not in SIZES or count > 1:
                raise ValueError(
                    f"--measure runs one of --size on one device, and not {size} on {count}: leave "
                    "it out, or pass --chips 1"
                )
    if not arguments.read:
        cells = _compile_all(arguments)
    if arguments.plot:
        draw(cells).savefig(arguments.plot)
    others = list({chip.name: chip for chip in others}.values())
    print(f"\n{_LEAST}\n\n{table(cells, others, tuple(arguments.alpha))}")
    rates = ", ".join(f"{alpha:g} ({name})" for name, alpha in alphas.items())
    print(f"\n{_BEST} {rates}.\n\n{best(cells, others, alphas)}")
    if arguments.measure:
        print(f"\n{_MEASURED}\n\n{beside(cells, _chip('here', cells[0]['dtype']))}")
    if (published := compare(cells)) is not None:
        print(f"\n{_PUBLISHED}\n\n{published}")


def _compile_all(arguments: TpuOptions) -> list[Cell]:
    targets = {size: config_of(size, arguments.vocab_size) for size in arguments.size}
    if arguments.target_config:
        targets = {pathlib.Path(arguments.target_config).stem: _config(arguments.target_config)}
    slices = {
        (name, count): devices_of(chip(name), count)
        for name in arguments.chip
        for count in arguments.chips
    }
    cells: list[Cell] = []
    print(HEADER, flush=True)
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
        case = _Case(size, drafter, batch, capacity, name, count)
        config, devices = targets[size], slices[name, count]
        layers = arguments.layers or (config.num_layers,)
        if layers[-1] > config.num_layers:
            raise ValueError(f"--layers is {[*layers]}; {size} has {config.num_layers} layers")
        made = [case.cell(arguments, config.truncated(n), devices) for n in layers]
        cell = made[-1]
        if arguments.layers:
            of_all = config.num_layers
            cell = extrapolated(made[0], made[1], arguments.layers, of_all, chip(name).memory)
        cells.append(cell)
        print(line(cell), flush=True)
        if arguments.json:  # after each cell: the next one may fail
            pathlib.Path(arguments.json).write_text(json.dumps(cells, indent=1))
    return cells


@dataclasses.dataclass(frozen=True)
class _Case:
    """What a cell is compiled for."""

    size: str
    drafter: str
    batch: int
    capacity: int
    chip: str
    chips: int

    def cell(self, arguments: TpuOptions, config: TransformerConfig, devices: np.ndarray) -> Cell:
        """Compiles a program, and returns what the report says of it."""
        target = shapes_of(config, arguments.dtype)
        vocab_size = target.model.vocab_size
        named = arguments.draft or DRAFT_OF.get(self.size, "150m")
        draft = shapes_of(config_of(named, vocab_size), arguments.dtype)
        sketch = DRAFTERS[self.drafter](target, draft)
        proposer = sketch.proposer
        decoder = Decoder(target.model, proposer, specjax.Match(), (2,), self.capacity)
        params = Params(target.params, sketch.params)
        split = sketch.draft if arguments.split_draft else None
        compiled = compile_loop(decoder, params, devices, self.batch, split)
        given = arguments.filled
        filled = self.capacity if given is None else min(given, self.capacity)
        if arguments.keep:
            folder = pathlib.Path(arguments.keep)
            folder.mkdir(parents=True, exist_ok=True)
            depth = f"-{config.num_layers}-layers" if arguments.layers else ""
            where = f"{self.chips}x{self.chip}-{self.batch}-{self.capacity}{depth}"
            (folder / f"{self.size}-{self.drafter}-{where}.txt").write_text(compiled.text)
        return {
            **dataclasses.asdict(self),
            "dtype": arguments.dtype,
            "filled": filled,
            "vocab_size": vocab_size,
            "draft": named,
            # None for a tree: siblings are no independent chances.
            "lookahead": proposer.max_depth if proposer.is_chain else None,
            **measure(compiled, vocab_size, self.chips, chip(self.chip).memory, filled),
        }


def _read(path: str) -> list[Cell]:
    """Cells that `--json` wrote."""
    try:
        cells = json.loads(pathlib.Path(path).read_text())
        if not isinstance(cells, list) or not all("bytes_per_step" in cell for cell in cells):
            raise ValueError("it holds no list of cells")
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"--read {path}: {error}; pass a file that --json wrote") from None
    return cells


def _expected(given: str) -> tuple[str, float]:
    name, _, alpha = given.partition("=")
    try:
        rate = float(alpha)
    except ValueError:
        rate = -1.0
    if name not in DRAFTERS or not 0 <= rate <= 1:
        known = ", ".join(DRAFTERS)
        raise ValueError(
            f"--expect {given!r} is no DRAFTER=ALPHA; the drafter must be one of {known}, and "
            "the acceptance rate lies in [0, 1]"
        )
    return name, rate


def _chip(name: str, dtype: str) -> Chip:
    """A published chip, or with "here" this machine, whose limits are measured."""
    if name != "here":
        return chip(name)
    rates = ceilings()
    flops = 1e9 * rates["float32" if dtype == "float32" else "bfloat16"]
    return Chip("here", math.inf, 1e9 * rates["bandwidth"], flops, flops, math.inf)


_PUBLISHED = (
    "Speed-ups that others measured, beside those of these times; `bench/tpu/published.py` says "
    "where the tokens a step are from."
)
_LEAST = (
    "Least milliseconds of a step, by the chips' published figures and these bytes, and the "
    "speed-up over no drafts on the first chip, at an acceptance rate."
)
_MEASURED = (
    "Steps on this machine's CPU with random weights, beside the prediction from the bytes of the "
    "TPU's program and the bandwidth and products that were measured here."
)
_BEST = (
    "The fastest case for one row, and the one with most tokens per second and chip, by these "
    "times and with expected acceptance rates of"
)


def _config(path: str) -> TransformerConfig:
    """Of a `config.json`, or of the folder with it."""
    from specjax.files import read_config

    given = pathlib.Path(path)
    folder = given if given.is_dir() else given.parent
    if not (folder / "config.json").is_file() or given not in (folder, folder / "config.json"):
        raise ValueError(f"--target-config {path} is no config.json, and no folder with one")
    return read_config(folder)[2]


@dataclasses.dataclass(frozen=True)
class TpuOptions(fields.Options):
    """The options of `python -m bench.tpu`."""

    size: tuple[str, ...] = fields.option(("1b",), "targets", choices=sorted(TARGETS))
    target_config: str | None = fields.option(
        None, "a config.json (or its folder) instead of a size"
    )
    layers: tuple[int, ...] = fields.option(
        (),
        "compile only as many first layers of a target, once for each of two numbers, and "
        "extrapolate to all of its layers",
    )
    draft: str | None = fields.option(None, "size of the draft model", choices=sorted(SIZES))
    split_draft: bool = fields.option(
        False, "split the draft model too; default: every chip holds all of it"
    )
    dtype: str = fields.option(
        "bfloat16", "of the weights; the activations of int8 weights are bfloat16", choices=DTYPES
    )
    vocab_size: int | None = fields.option(
        None, f"of --size; default: that of a published target, otherwise {VOCABULARY}"
    )
    chip: tuple[str, ...] = fields.option(("v5e",), f"of {', '.join(CHIPS)}")
    chips: tuple[int, ...] = fields.option((1,), "in one mesh")
    drafter: tuple[str, ...] = fields.option(
        ("none", "draft"), "drafters", choices=sorted(DRAFTERS)
    )
    batch: tuple[int, ...] = fields.option((1,), "rows")
    capacity: tuple[int, ...] = fields.option((1024,), "tokens of a row")
    filled: int | None = fields.option(None, "tokens of the longest row; default: the capacity")
    also: tuple[str, ...] = fields.option(
        (),
        "predict these chips by the same bytes; "
        "here: this machine, by its measured bandwidth and products",
    )
    alpha: tuple[float, ...] = fields.option((0.6, 0.8), "acceptance rates")
    expect: tuple[str, ...] = fields.option(
        ("draft=0.8", "ngram=0.4", "eagle3=0.77", "dflash=0.76", "dspark=0.85"),
        "acceptance rates by drafter, for the best case",
        metavar="DRAFTER=ALPHA",
    )
    read: tuple[str, ...] = fields.option(
        (), "print the tables of cells that --json wrote, and compile nothing", metavar="JSON"
    )
    measure: bool = fields.option(
        False,
        "also run the cells on this machine's CPU, with "
        "random weights, and compare with what their bytes predict for it",
    )
    json: str | None = fields.option(None, "write the list of cells to this file")
    plot: str | None = fields.option(None, "draw the bytes of a step to this file")
    keep: str | None = fields.option(None, "write the optimised programs to this folder")


def entry() -> None:
    prepare_environment()
    run(main)
