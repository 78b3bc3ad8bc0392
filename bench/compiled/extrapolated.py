"""What a target of many layers moves, by what it moves with fewer of them.

The layers of a target repeat, so every figure of a cell is a line in their number.  libtpu compiles
no program that does not fit into the memory of a chip, and a GPU's takes minutes.
"""

from __future__ import annotations

from bench.compiled.cells import Cell

_LINEAR = (
    "target_bytes", "active_bytes", "flops", "int8_operations", "argument_bytes", "scratch_bytes",
    "predicted_bytes", "launches_least", "launches_most", "terms_written", "terms_written_bytes",
    "of_one_block", "padded", "padded_bytes", "cache_copies",
)  # fmt: skip
"""The last ones are figures of GPUs."""


def extrapolated(few: Cell, more: Cell, layers: tuple[int, ...], every: int, memory: float) -> Cell:
    """Returns the cell of `every` layers, from those of the two numbers of `layers`.

    The copies, host transfers and sums over chips are those of the second cell.
    """
    apart = (every - layers[1]) / (layers[1] - layers[0])

    def line(first: int, second: int) -> int:
        return round(second + (second - first) * apart)

    bytes_per_step = {
        kind: line(few["bytes_per_step"][kind], size)
        for kind, size in more["bytes_per_step"].items()
    }
    made = {name: line(few[name], more[name]) for name in _LINEAR if name in more}
    needed = made["argument_bytes"] + made["scratch_bytes"]
    return {
        **more,
        **made,
        "bytes_per_step": bytes_per_step,
        "bytes_by_phase": {},
        "fits": needed <= memory,
        "missing_bytes": max(0, needed - int(memory)),
        "compile_seconds": few["compile_seconds"] + more["compile_seconds"],
        "compiled_layers": list(layers),
    }
