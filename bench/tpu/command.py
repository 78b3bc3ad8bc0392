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

from bench.command import run
from bench.compiled.best import best
from bench.compiled.cases import Platform, compile_all
from bench.compiled.cells import Cell, draw
from bench.compiled.chips import CHIPS, Chip, chip
from bench.compiled.drafters import DRAFTERS
from bench.compiled.options import ProgramOptions, check
from bench.compiled.programs import compile_loop
from bench.compiled.roofline import table
from bench.compiled.sizes import SIZES
from bench.machine import ceilings
from bench.tpu.lines import HEADER, line
from bench.tpu.measured import beside
from bench.tpu.published import compare
from bench.tpu.slices import devices_of, prepare_environment
from specjax.options import fields
from specjax.options.command import parse
from specjax.plot import new_figure


def main(argv: list[str] | None = None) -> None:
    arguments = parse(TpuOptions, argv, __doc__, "python -m bench.tpu")
    if arguments.plot:
        new_figure()  # fails before the work, not after it, if matplotlib is missing
    if not all(0 <= alpha <= 1 for alpha in arguments.alpha):
        raise ValueError(f"--alpha is {[*arguments.alpha]}; acceptance rates lie in [0, 1]")
    check(arguments)
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
        cells = compile_all(arguments, Platform(devices_of, HEADER, line, compile_loop))
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


@dataclasses.dataclass(frozen=True)
class TpuOptions(ProgramOptions):
    """The options of `python -m bench.tpu`."""

    chip: tuple[str, ...] = fields.option(("v5e",), f"of {', '.join(CHIPS)}")
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


def entry() -> None:
    prepare_environment()
    run(main)
