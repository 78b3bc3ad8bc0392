"""A cell of the report: what is said of one compiled program."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax

from bench.compiled.flops import product_flops
from bench.compiled.hlo import parse
from bench.compiled.programs import Compiled
from bench.compiled.traffic import KINDS, host_transfers, traffic
from specjax import LinenModel, Transformer
from specjax.models import BLOCK_SLOTS
from specjax.plot import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cell = dict[str, Any]
"""A cell, as JSON holds it."""


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
    operations = product_flops(
        compiled.decoder.step, compiled.params, compiled.state, blocks=blocks
    )
    needed = compiled.argument_bytes + compiled.scratch_bytes
    collectives = [
        {"kind": kind, "bytes": size, "count": number}
        for (kind, size), number in sorted(counted.collectives.items())
    ]
    return {
        "bytes_per_step": {kind: counted.bytes[kind] for kind in KINDS},
        "target_bytes": counted.weights["target"],
        "active_bytes": active_bytes(compiled),
        "bytes_by_phase": {name: dict(kinds) for name, kinds in counted.by_phase.items()},
        "flops": operations["float"] // chips,
        "int8_operations": operations["int8"] // chips,
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


def active_bytes(compiled: Compiled) -> int:
    """The weights of the target that a step must read: of experts, as many as its nodes may choose.

    They are divided among the devices of a mesh.  Of an embedding that is not the output matrix a
    step reads rows only, which do not count.
    """
    params: Any = compiled.params.target
    model, total = compiled.decoder.target, 0
    assert isinstance(model, LinenModel) and isinstance(model.module, Transformer)
    c = model.module.config
    pairs = len(compiled.state.length) * compiled.decoder.proposer.num_nodes * c.experts_per_token
    for path, leaf in jax.tree.leaves_with_path(params):
        names = [entry.key for entry in path if hasattr(entry, "key")]
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        size = math.prod(shape) * jax.dtypes.itemsize_bits(leaf.dtype) // 8
        if names[-1] in ("gate", "up", "down") and leaf.ndim >= 3:
            size = size * min(pairs, c.num_experts) // c.num_experts
        if names != ["embedding"] or "head" not in params:
            total += size
    return total


def draw(cells: list[Cell]) -> Figure:
    """A bar for each cell: the bytes of a step, stacked by kind."""
    figure = new_figure(10, 1.5 + 0.35 * len(cells))
    axes = figure.add_subplot()
    names = [
        f"{cell['size']} {cell['dtype']} {cell['drafter']}, {cell['chips']} x {cell['chip']}, "
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
