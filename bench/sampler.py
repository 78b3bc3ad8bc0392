"""`python -m bench.sampler`: what each part of the sampler costs a step, and top-k and top-p against sorting.

One row, five nodes.  Parts are timed in turn, so that a drift of the machine meets all alike; medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.command import run
from specjax import Processors, Sampling, eos_of_rows, make_key, sampling, warp
from specjax.logprobs import Logprobs
from specjax.processors import process
from specjax.types import ABSENT

NODES, TOP_K, TOP_P = 5, 50, 0.9
TOKENS, LENGTH = np.arange(64, dtype=np.int32)[None], np.array([32], np.int32)


def parts(size: int) -> dict[str, tuple[Callable[..., Any], Any]]:
    """A function of logits [1, N, V] and of what else it is given, and that."""
    made: dict[str, tuple[Callable[..., Any], Any]] = {
        "temperature": (warp, Sampling.create(1, 0.8)),
        "greedy": (warp, Sampling.create(1, 0.0)),
        f"top-k {TOP_K}": (warp, Sampling.create(1, top_k=TOP_K)),
        f"top-p {TOP_P}": (warp, Sampling.create(1, top_p=TOP_P)),
        "min-p 0.05": (warp, Sampling.create(1, min_p=0.05)),
        "top-k, top-p and min-p": (warp, Sampling.create(1, 0.8, TOP_K, TOP_P, 0.05)),
        f"top-k {TOP_K} by sorting": (sorted_top_k, jnp.int32(TOP_K)),
        f"top-p {TOP_P} by sorting": (sorted_top_p, jnp.float32(TOP_P)),
    }
    for name, settings in {
        "three penalties": {
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
        },
        "logit bias": {"logit_bias": {5: 1.0}},
        "8 bad phrases": {"bad_words": [[n, n + 1] for n in range(8)]},
        "minimum new tokens": {"min_new_tokens": 8},
    }.items():
        made[name] = (run_processors, begun(Processors.create(1, size, **settings), size))
    made["a user's function"] = (run_function, begun(Processors(), size, counted=True))
    made["noise, shared"] = (shared_noise, jax.random.split(make_key(0), 1))
    made["log-probabilities"] = (lambda x, _: logprobs(x, 0), None)
    made["log-probabilities, best 5"] = (lambda x, _: logprobs(x, 5), None)
    return made


def sorted_top_k(x: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.where(
        x >= jax.lax.dynamic_index_in_dim(jnp.sort(x), x.shape[-1] - k, axis=2), x, -jnp.inf
    )


def sorted_top_p(x: jax.Array, p: jax.Array) -> jax.Array:
    ordered = jnp.sort(x, descending=True)
    last = (jnp.cumsum(jax.nn.softmax(ordered), axis=-1) < p).sum(-1, keepdims=True)
    return jnp.where(
        x >= jnp.take_along_axis(ordered, jnp.minimum(last, x.shape[-1] - 1), axis=2), x, -jnp.inf
    )


def begun(processors: Processors | None, size: int, counted: bool = False) -> Processors:
    assert processors is not None
    return processors.begin(jnp.asarray(TOKENS), jnp.asarray(LENGTH), size, counted)


def state(processors: Processors) -> Any:
    ends = jnp.asarray(eos_of_rows([[0]]))
    return types.SimpleNamespace(
        processors=processors, tokens=jnp.asarray(TOKENS), length=jnp.asarray(LENGTH), eos=ends
    )


def path() -> jax.Array:
    return jnp.where(jnp.tri(NODES, NODES - 1, -1, bool), 6, ABSENT)[None]


def run_processors(x: jax.Array, processors: Processors) -> jax.Array:
    return process(state(processors), x, path())


def run_function(x: jax.Array, processors: Processors) -> jax.Array:
    return process(
        state(processors), x, path(), lambda logits, text, counts: logits - 0.1 * counts, 64
    )


def shared_noise(x: jax.Array, key: jax.Array) -> jax.Array:
    return sampling.SharedDraw.create(
        key, jnp.asarray(LENGTH) - 1, NODES - 1, x.shape[-1], jnp.array(True)
    ).gumbel


def logprobs(x: jax.Array, top: int) -> Logprobs:
    return Logprobs.measure(x, x, jnp.zeros((1, NODES), jnp.int32), top)


def measure(size: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of each part."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, NODES, size)), jnp.float32) * 2.5
    made = {name: (jax.jit(function), given) for name, (function, given) in parts(size).items()}
    for function, given in made.values():
        jax.block_until_ready(function(logits, given))
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(rounds):
        for name, (function, given) in made.items():
            started = time.perf_counter()
            jax.block_until_ready(function(logits, given))
            seconds[name].append(time.perf_counter() - started)
    return {name: 1e3 * statistics.median(found) for name, found in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[32_000, 152_000], help="vocabularies"
    )
    parser.add_argument("--rounds", type=int, default=15, help="measured, after one that compiles")
    arguments = parser.parse_args()
    columns = [measure(size, arguments.rounds) for size in arguments.sizes]
    print(
        f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores, jax {jax.__version__}, {NODES} nodes, milliseconds"
    )
    print(
        "\n| part |"
        + "".join(f" {size} |" for size in arguments.sizes)
        + "\n|---|"
        + "---|" * len(columns)
    )
    for name in columns[0]:
        print(f"| {name} |" + "".join(f" {column[name]:.2f} |" for column in columns))


if __name__ == "__main__":
    run(main)
