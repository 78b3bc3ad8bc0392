"""python -m bench.gpu: what a step of specjax would be on NVIDIA GPUs, without a GPU.

It compiles the decoding loop with XLA's compiler for GPUs that are not there, and counts kernels,
waits of the host, copies and bytes.  It needs an environment of its own, without driver or CUDA:

    python3 -m venv .venv-gpu && .venv-gpu/bin/pip install -r .ci/gpu.txt
    .venv-gpu/bin/python -m bench.gpu --size 1b --chip h100 --batch 1 8

XLA tries tiles, and Triton against cuBLAS, on a chip.  Here each product keeps a default tile.
Loops, branches, copies and most fusions do not depend on it; registers and times cannot be seen.
"""

from __future__ import annotations

import dataclasses
import functools

from bench.command import run
from bench.compiled.cases import Platform, compile_all
from bench.compiled.cells import draw
from bench.compiled.options import ProgramOptions, check
from bench.gpu.described import GPUS, devices_of, prepare_environment
from bench.gpu.lines import HEADER, line
from bench.gpu.programs import WHOLE_LOOP, GpuProgram, compile_for_gpu
from specjax.options import fields
from specjax.options.command import parse
from specjax.plot import new_figure


@dataclasses.dataclass(frozen=True)
class GpuOptions(ProgramOptions):
    """The options of `python -m bench.gpu`."""

    chip: tuple[str, ...] = fields.option(("h100",), "kinds of GPUs", choices=sorted(GPUS))
    whole_loop: bool = fields.option(
        False, "let XLA put loops in CUDA graphs, so that all of decoding is one"
    )


def main(argv: list[str] | None = None) -> None:
    arguments = parse(GpuOptions, argv, __doc__, "python -m bench.gpu")
    if arguments.plot:
        new_figure()  # fails before the work, not after it, if matplotlib is missing
    check(arguments)
    compile_ = functools.partial(
        compile_for_gpu, options=WHOLE_LOOP if arguments.whole_loop else None
    )
    platform = Platform[GpuProgram](
        devices_of, HEADER, line, compile_, lambda made: made.step.cell()
    )
    cells = compile_all(arguments, platform)
    if arguments.plot:
        draw(cells).savefig(arguments.plot)


def entry() -> None:
    prepare_environment()
    run(main)
