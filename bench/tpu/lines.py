"""The lines of the report on TPUs."""

from __future__ import annotations

from collections import Counter

from bench.compiled.cells import Cell
from bench.compiled.traffic import KINDS

_COLUMNS = (
    "size", "dtype", "drafter", "chips", "batch", "capacity", "weights", "cache read", "written",
    "copied", "states", "logits", "collectives", "other", "read over active", "GFLOP",
    "all-reduces", "arguments", "scratch", "predicted", "fits", "compiled in",
)  # fmt: skip
HEADER = (
    "Megabytes per chip and step; arguments, scratch and the prediction in gigabytes.  Read over "
    "active: the target's weights that a step reads, over those that it must read, where each node "
    "chooses experts of its own.\n\n"
    f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}"
)


def line(cell: Cell) -> str:
    moved = [f"{cell['bytes_per_step'][kind] / 1e6:.1f}" for kind in KINDS]
    counts = Counter[str]()
    for entry in cell["collectives"]:
        counts[entry["kind"]] += entry["count"]
    others = [f"{number} {kind}" for kind, number in counts.items() if kind != "all-reduce"]
    memory = [cell[f"{name}_bytes"] / 1e9 for name in ("argument", "scratch", "predicted")]
    fits = "yes" if cell["fits"] else f"no, {cell['missing_bytes'] / 1e9:.1f} GB too much"
    entries = [
        cell["size"], cell["dtype"], cell["drafter"], f"{cell['chips']} x {cell['chip']}",
        cell["batch"], cell["capacity"], *moved,
        f"{cell['target_bytes'] / cell['active_bytes']:.3f}",
        f"{(cell['flops'] + cell['int8_operations']) / 1e9:.1f}",
        ", ".join([str(counts["all-reduce"]), *others]), *(f"{size:.2f}" for size in memory), fits,
        f"{cell['compile_seconds']:.0f} s",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, entries))} |"
