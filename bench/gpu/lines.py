"""The lines of the report on GPUs."""

from __future__ import annotations

from bench.compiled.cells import Cell
from bench.compiled.chips import chip
from bench.compiled.roofline import least_seconds
from bench.gpu.counting import shown

LAUNCH_SECONDS = 2e-6
"""Of a kernel in a CUDA graph, from its start to the start of the next one.  It is an estimate."""

_COLUMNS = (
    "size", "dtype", "drafter", "GPUs", "batch", "capacity", "MB read and written", "launches",
    "host waits", "graphs", "terms written", "padded", "caches copied", "tables gathered",
    "products", "of one block", "scratch, MB", "fits", "bytes, ms", "launches, ms", "least, ms",
    "compiled in",
)  # fmt: skip
HEADER = (
    "Of a step and GPU.  Launches are kernels, copies and library calls, with the filters off and "
    "all on; the least time is that of the bytes and of the fewest launches, at "
    f"{1e6 * LAUNCH_SECONDS:g} µs each.  Terms are of products of one row, which are "
    "written to memory before they are added.\n\n"
    f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}"
)


def launch_seconds(cell: Cell) -> float:
    """Of the fewest launches of a step."""
    return LAUNCH_SECONDS * cell["launches_least"]


def line(cell: Cell) -> str:
    moved = sum(cell["bytes_per_step"].values())
    reading, launching = least_seconds(cell, chip(cell["chip"])), launch_seconds(cell)

    def listed(counts: dict[str, int]) -> str:
        return ", ".join(f"{number} {name}" for name, number in counts.items()) or "0"

    def sized(name: str) -> str:
        return f"{cell[name]} ({cell[f'{name}_bytes'] / 1e6:.0f} MB)" if cell[name] else "0"

    entries = [
        cell["size"], cell["dtype"], cell["drafter"], f"{cell['chips']} x {cell['chip']}",
        cell["batch"], cell["capacity"], f"{moved / 1e6:.0f}",
        shown((cell["launches_least"], cell["launches_most"])),
        shown((cell["waits_least"], cell["waits_most"])),
        "the loop is one" if cell["whole_loop"] else cell["graphs"],
        sized("terms_written"), sized("padded"), cell["cache_copies"], cell["tables_gathered"],
        listed({**cell["products"], **cell["library_calls"]}), cell["of_one_block"],
        f"{cell['scratch_bytes'] / 1e6:.0f}",
        "yes" if cell["fits"] else f"no, {cell['missing_bytes'] / 1e9:.1f} GB too much",
        f"{1e3 * reading:.2f}", f"{1e3 * launching:.2f}", f"{1e3 * (reading + launching):.2f}",
        f"{cell['compile_seconds']:.0f} s",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, entries))} |"
