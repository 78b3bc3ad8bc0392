"""Steps of the report's cells on this machine's CPU, beside their prediction by the same bytes."""

from __future__ import annotations

import statistics
from typing import Any

import jax
import jax.numpy as jnp

import specjax
from bench.compiled.chips import Chip
from bench.compiled.drafters import DRAFTERS
from bench.compiled.roofline import least_seconds
from bench.compiled.sizes import config_of, shapes_of
from specjax import Decoder, Params
from specjax.measure import Sample, Timed, take_turns
from specjax.methods import SharedParams
from specjax.tuning import step_seconds
from specjax.types import Arrays

_STEPS, _ROUNDS = 8, 5


class _Steps(Timed):
    """Decoding with random weights, with as much text as the cell says."""

    def __init__(self, cell: dict[str, Any], weights: dict[tuple[Any, ...], Arrays]) -> None:
        super().__init__(f"{cell['size']}, {cell['drafter']}", 1)
        vocab_size, rows = cell["vocab_size"], cell["batch"]
        target = shapes_of(config_of(cell["size"], vocab_size), cell["dtype"])
        draft = shapes_of(config_of(cell["draft"], vocab_size), cell["dtype"])
        sketch = DRAFTERS[cell["drafter"]](target, draft)
        # Cells of one size share their weights, which would not fit many times.
        kind = cell["size"], cell["dtype"], vocab_size
        made = {kind: target.params, (*kind, cell["drafter"], cell["draft"]): sketch.params}
        for name, shapes in made.items():
            if name not in weights:
                weights[name] = _random(shapes)
        params, proposer = (weights[name] for name in made)
        if isinstance(proposer, SharedParams):
            shared = {name: params[name] for name in proposer.target}
            proposer = SharedParams(proposer.own, shared)
        room = min(cell["capacity"], target.model.max_positions)
        self._decoder = Decoder(target.model, sketch.proposer, specjax.Match(), (), room)
        self._params, self._rows = Params(params, proposer), rows
        # The text reaches the cell's length in the middle of the measurement.
        ahead = _STEPS * (sketch.proposer.max_depth + 1)
        self._length = max(1, min(cell["filled"] - ahead // 2, room - ahead - 1))

    def run(self, item: int) -> Sample:
        return Sample(
            step_seconds(self._decoder, self._params, self._rows, self._length, _STEPS, 0.7)
        )


def _random(shapes: Arrays) -> Arrays:
    """Weights of these shapes; whole numbers are 0."""
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))

    def fill(key: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros(leaf.shape, leaf.dtype)
        return 0.02 * jax.random.normal(key, leaf.shape, leaf.dtype)

    return jax.tree.unflatten(
        structure, [fill(k, leaf) for k, leaf in zip(keys, leaves, strict=True)]
    )


def beside(cells: list[dict[str, Any]], here: Chip) -> str:
    """A table: predicted and measured milliseconds of a step, and both over a step without drafts.

    The cells take turns.  A cell is left out if other processes disturbed all its samples.
    """
    weights: dict[tuple[Any, ...], Arrays] = {}
    entries = [_Steps(cell, weights) for cell in cells]
    for entry in entries:
        entry.run_first()
    take_turns(entries, _ROUNDS)
    lines = [
        "| size | dtype | drafter | batch | predicted, ms | measured, ms | measured over predicted "
        "| over no drafts, predicted | over no drafts, measured | off by |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    plain: dict[tuple[Any, ...], tuple[float, float]] = {}
    for cell, entry in zip(cells, entries, strict=True):
        about = tuple(cell[name] for name in ("size", "dtype", "batch", "capacity", "filled"))
        if not entry.seconds[0]:
            lines.append(f"| {cell['size']} | | {cell['drafter']} | | disturbed | | | | | |")
            continue
        predicted, measured = least_seconds(cell, here), statistics.median(entry.seconds[0])
        if cell["drafter"] == "none":
            plain[about] = predicted, measured
        figures = [f"{1e3 * predicted:.2f}", f"{1e3 * measured:.2f}", f"{measured / predicted:.2f}"]
        if about in plain:
            ratios = predicted / plain[about][0], measured / plain[about][1]
            figures += [f"{ratio:.2f}" for ratio in ratios]
            figures.append(f"{100 * (ratios[0] / ratios[1] - 1):+.0f} %")
        else:
            figures += [""] * 3
        named = [str(cell[name]) for name in ("size", "dtype", "drafter", "batch")]
        lines.append(f"| {' | '.join([*named, *figures])} |")
    return "\n".join(lines)
