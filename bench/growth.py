"""python -m bench.growth: how time and memory grow, compared with the expected laws."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import time
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from bench.command import Report, run
from specjax import (
    Decoder,
    LinenModel,
    Match,
    NGram,
    NoProposer,
    Params,
    Sampling,
    Transformer,
    TransformerConfig,
    make_key,
)
from specjax.options import fields
from specjax.options.command import parse
from specjax.plot import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASE = {"batch": 1, "prompt": 64, "drafts": 4, "vocabulary": 4096, "layers": 6}
_DEPARTS = 1.25

# What varies, its values, and how each part of the cost should grow with it.
AXES: dict[str, tuple[list[int], dict[str, str]]] = {
    "batch": (
        [1, 2, 4, 8, 16],
        {
            "step": "flat while bound by reading weights, then linear in the rows",
            "memory": "linear: KV caches",
            "compile": "flat",
        },
    ),
    "prompt": (
        [64, 256, 1024, 2048],
        {
            "step": "flat, then linear once the KV cache is larger than the weights",
            "memory": "linear: KV cache",
            "compile": "flat",
        },
    ),
    "drafts": (
        [1, 2, 4, 6, 8],
        {
            "step": "flat while bound by memory, then linear in the nodes",
            "memory": "flat",
            "compile": "flat",
        },
    ),
    "vocabulary": (
        [1024, 4096, 16384, 65536],
        {
            "step": "linear: head and noise",
            "memory": "linear: embedding and head",
            "compile": "flat",
        },
    ),
    "layers": (
        [2, 4, 8, 12],
        {"step": "linear", "memory": "linear", "compile": "linear, since layers are unrolled"},
    ),
}
PARTS = {"step": ("ms a step", 1e3), "memory": ("MB", 1e-6), "compile": ("s to compile", 1.0)}


@dataclasses.dataclass(frozen=True)
class GrowthOptions(fields.Options):
    """The options of `python -m bench.growth`."""

    axes: tuple[str, ...] = fields.option(tuple(AXES), "what grows", choices=sorted(AXES))
    steps: int = fields.option(32, "decoding steps per sample")
    rounds: int = fields.option(5, "measured turns")
    json: str | None = fields.option(None, "write the figures to this file")
    plot: str | None = fields.option(None, "draw the curves into this file")


def main(argv: list[str] | None = None) -> None:
    arguments = parse(GrowthOptions, argv, __doc__, "python -m bench.growth")
    if arguments.plot:
        new_figure()  # fails before the measurement, not after it, if matplotlib is missing
    figures: dict[str, list[Report]] = {}
    turns = [(axis, value) for axis in arguments.axes for value in AXES[axis][0]]
    for axis, value in tqdm(turns, unit="setting", disable=None):
        row = measure({**BASE, axis: value}, arguments.steps, arguments.rounds)
        figures.setdefault(axis, []).append({axis: value, **row})
    for axis, rows in figures.items():
        values = np.array([row[axis] for row in rows], float)
        print(f"\n{axis}")
        for part, words in AXES[axis][1].items():
            _, departs = law(values, np.array([row[part] for row in rows]), words)
            print(f"  {part}: {words}{'; ' * bool(departs)}{departs}")
        print(f"\n| {axis} | step, ms | memory, MB | compile, s |\n|---|---|---|---|")
        for row in rows:
            print(
                f"| {row[axis]} | {row['step'] * 1e3:.2f} | {row['memory'] / 1e6:.1f} "
                f"| {row['compile']:.1f} |"
            )
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(figures, indent=1))
    if arguments.plot:
        plot(figures).savefig(arguments.plot)


def measure(setting: dict[str, int], steps: int, rounds: int) -> dict[str, float]:
    """Seconds per step, bytes of memory of the compiled run, and seconds to compile it."""
    config = TransformerConfig(
        vocab_size=setting["vocabulary"], hidden_size=256, mlp_size=688,
        num_layers=setting["layers"], num_heads=4, num_kv_heads=2, head_dim=64, max_positions=8192,
    )  # fmt: skip
    model = LinenModel(Transformer(config))
    params = Params(model.init(jax.random.key(0)))
    rows, length = setting["batch"], setting["prompt"]
    proposer = NGram(setting["drafts"]) if setting["drafts"] else NoProposer()
    # The same for all numbers of drafts, so that only one thing varies.
    capacity = length + (rounds + 2) * steps * (max(AXES["drafts"][0]) + 1)
    decoder = Decoder(model, proposer, Match(), (), capacity)
    prompt = jnp.asarray(
        np.random.default_rng(0).integers(1, config.vocab_size, (rows, length)), jnp.int32
    )
    lengths = jnp.full(rows, length, jnp.int32)
    keys, sampling = jax.random.split(make_key(0), rows), Sampling.create(rows, 0.0)
    state = decoder.prefill(
        params, prompt, lengths, limit=lengths * 0 + capacity, sampling=sampling, key=keys
    )
    jitted = jax.jit(lambda p, s: decoder.run(p, s, steps), donate_argnums=1)
    started = time.perf_counter()
    compiled = jitted.lower(params, state).compile()
    seconds = time.perf_counter() - started
    memory = compiled.memory_analysis()
    assert memory is not None
    samples = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        state = jax.block_until_ready(compiled(params, state))
        samples.append((time.perf_counter() - started) / steps)
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return {"step": statistics.median(samples[1:]), "memory": float(held), "compile": seconds}


def law(x: np.ndarray, y: np.ndarray, words: str) -> tuple[np.ndarray, str]:
    """Fit a + b x by least squares of the relative error, with b = 0 if `words` is "flat".

    Returns:
      The fitted values, and where and by how much `y` departs from them, or "".
    """
    slope = 0.0 if words == "flat" else 1.0
    a = np.stack([np.ones_like(x), slope * x], axis=1) / y[:, None]
    fitted = (
        np.stack([np.ones_like(x), slope * x], axis=1)
        @ np.linalg.lstsq(a, np.ones_like(x), rcond=None)[0]
    )
    worst = int(np.argmax(np.abs(np.log(np.maximum(y, 1e-12) / np.maximum(fitted, 1e-12)))))
    ratio = y[worst] / max(fitted[worst], 1e-12)
    return (
        fitted,
        "" if 1 / _DEPARTS < ratio < _DEPARTS else f"departs: {ratio:.1f} x at {x[worst]:.0f}",
    )


def plot(figures: dict[str, list[Report]]) -> Figure:
    """Draw every measured cost, and its law, against every axis."""
    figure = new_figure(4 * len(figures), 9)
    panels = figure.subplots(len(PARTS), len(figures), squeeze=False)
    for column, (axis, rows) in zip(panels.T, figures.items(), strict=True):
        x = np.array([row[axis] for row in rows], float)
        for panel, (part, (unit, scale)) in zip(column, PARTS.items(), strict=True):
            y, words = np.array([row[part] for row in rows]) * scale, AXES[axis][1][part]
            fitted, departs = law(x, y, words)
            panel.plot(x, y, marker="o", label="measured")
            panel.plot(x, fitted, linestyle=":", label="law")
            panel.set(
                xlabel=axis,
                ylabel=unit,
                xscale="log",
                yscale="log",
                ylim=(y.min() / 2, y.max() * 2),
            )
            panel.set_xticks(x, [f"{value:g}" for value in x], minor=False)
            panel.set_xticks([], minor=True)
            panel.yaxis.set_major_formatter("{x:g}")
            panel.yaxis.set_minor_formatter("")
            panel.set_title(f"{words}\n{departs}", fontsize=7)
    panels[0, 0].legend(fontsize=7)
    return figure


if __name__ == "__main__":
    run(main)
