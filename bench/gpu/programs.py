"""The decoding loop compiled for a GPU that is not there, with the thunks that XLA made of it."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from bench.compiled.programs import Compiled, compile_loop
from bench.gpu.steps import Step, step_of
from bench.gpu.thunks import Thunk, read_thunks
from specjax import Decoder, LinenModel, Params

WHOLE_LOOP: Mapping[str, str] = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
    ),
    "xla_gpu_graph_min_graph_size": "1",
}
"""Options that put loops in CUDA graphs.  In `XLA_FLAGS` the first may be "+WHILE"."""


@dataclasses.dataclass(frozen=True)
class GpuProgram(Compiled):
    """A program, and its tree of thunks."""

    root: Thunk
    sequence: str

    @property
    def step(self) -> Step:
        return step_of(self, self.root)


def compile_for_gpu(
    decoder: Decoder,
    params: Params,
    devices: np.ndarray,
    rows: int,
    split_draft: LinenModel | None = None,
    options: Mapping[str, str] | None = None,
) -> GpuProgram:
    """As `compile_loop`, with the thunks, which XLA writes to a folder."""
    with tempfile.TemporaryDirectory() as folder:
        dumped = {"xla_dump_to": folder, **(options or {})}
        compiled = compile_loop(decoder, params, devices, rows, split_draft, dumped)
        # With CUDA graphs there are two sequences, of which the last one runs.
        sequences = sorted(pathlib.Path(folder).glob("*.thunk_sequence*.txt"))
        (metadata,) = pathlib.Path(folder).glob("*.thunk_metadata.txt")
        sequence = sequences[-1].read_text()
        root = read_thunks(sequence, metadata.read_text())
    fields: dict[str, Any] = {
        f.name: getattr(compiled, f.name) for f in dataclasses.fields(Compiled)
    }
    return GpuProgram(**fields, root=root, sequence=sequence)
