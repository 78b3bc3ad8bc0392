"""python -m bench.growth: how time and memory grow, each curve beside the law that it should follow."""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from specjax import Decoder, LinenModel, Match, NGram, NoProposer, Params, Sampling, Transformer, TransformerConfig

BASE = {"batch": 1, "prompt": 64, "drafts": 4, "vocabulary": 4096, "layers": 6}

# What varies, its values, and the law in words.
AXES: dict[str, tuple[list[int], str]] = {
    "batch": ([1, 2, 4, 8, 16], "flat while weights are read, then linear in the rows"),
    "prompt": ([64, 256, 1024, 2048], "flat, and linear in the slots once the cache outweighs the weights"),
    "drafts": ([1, 2, 4, 6, 8], "flat while a pass is bound by memory, then linear in the nodes"),
    "vocabulary": ([1024, 4096, 16384, 65536], "linear in the vocabulary: head and noise"),
    "layers": ([2, 4, 8, 12], "linear in the layers, for the compilation too, since layers are unrolled"),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.growth", description=__doc__)
    parser.add_argument("--axes", nargs="+", choices=sorted(AXES), default=list(AXES))
    parser.add_argument("--steps", type=int, default=32, help="decoding steps of a sample")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--plot", help="draw the curves into this file")
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    turns = [(axis, value) for axis in arguments.axes for value in AXES[axis][0]]
    for axis, value in tqdm(turns, unit="setting", disable=None):
        row = measure({**BASE, axis: value}, arguments.steps, arguments.rounds)
        found.setdefault(axis, []).append({axis: value, **row})
    for axis, rows in found.items():
        print(f"\n{axis}: {AXES[axis][1]}\n\n| {axis} | step, ms | memory, MB | compile, s |\n|---|---|---|---|")
        for row in rows:
            print(f"| {row[axis]} | {row['step'] * 1e3:.2f} | {row['memory'] / 1e6:.1f} | {row['compile']:.1f} |")
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(found, indent=1))
    if arguments.plot:
        plot(found, arguments.plot)


def measure(setting: dict[str, int], steps: int, rounds: int) -> dict[str, float]:
    """Seconds a step, bytes of arguments and scratch of the compiled run, and seconds to compile it."""
    config = TransformerConfig(
        vocab_size=setting["vocabulary"], hidden_size=256, mlp_size=688, num_layers=setting["layers"], num_heads=4,
        num_kv_heads=2, head_dim=64, max_positions=8192,
    )  # fmt: skip
    model = LinenModel(Transformer(config))
    params = Params(model.init(jax.random.key(0)))
    rows, length = setting["batch"], setting["prompt"]
    proposer = NGram(setting["drafts"]) if setting["drafts"] else NoProposer()
    capacity = length + (rounds + 2) * steps * (setting["drafts"] + 1)
    decoder = Decoder(model, proposer, Match(), (), capacity)
    prompt = jnp.asarray(np.random.default_rng(0).integers(1, config.vocab_size, (rows, length)), jnp.int32)
    lengths = jnp.full(rows, length, jnp.int32)
    keys, sampling = jax.random.split(jax.random.key(0), rows), Sampling.create(rows, 0.0)
    state = decoder.prefill(params, prompt, lengths, limit=lengths * 0 + capacity, sampling=sampling, key=keys)
    run: Callable = jax.jit(lambda p, s: decoder.run(p, s, steps), donate_argnums=1)
    started = time.perf_counter()
    compiled = run.lower(params, state).compile()
    seconds = time.perf_counter() - started
    memory: Any = compiled.memory_analysis()
    samples = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        state = jax.block_until_ready(compiled(params, state))
        samples.append((time.perf_counter() - started) / steps)
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return {"step": statistics.median(samples[1:]), "memory": float(held), "compile": seconds}


def plot(found: dict[str, list[dict[str, Any]]], path: str) -> None:
    """A panel an axis: time a step, with a line of slope one through its last point."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(found), figsize=(4 * len(found), 3.5), squeeze=False)
    for panel, (axis, rows) in zip(panels[0], found.items(), strict=True):
        x, y = np.array([row[axis] for row in rows]), np.array([row["step"] for row in rows]) * 1e3
        panel.loglog(x, y, marker="o", label="measured")
        panel.loglog(x, y[-1] * x / x[-1], linestyle=":", label="linear")
        panel.set_xlabel(axis)
        panel.set_ylabel("ms a step")
        panel.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
