"""`python -m bench.sampler`: the cost of the sampler's parts, and of top-k and top-p by sorting.

The input is one row of five nodes.  The parts are timed in turn, and the report has medians.
"""

from __future__ import annotations

import dataclasses
import math
import time
import types
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from bench.command import run
from specjax import Automaton, Processors, Sampling, eos_of_rows, make_key, sampling, warp
from specjax.decoding import Logprobs
from specjax.measure import Sample, Timed, describe, first_calls, take_turns
from specjax.options import fields
from specjax.options.command import parse
from specjax.processors import process
from specjax.types import ABSENT, Arrays, DecodeState

NODES, TOP_K, TOP_P = 5, 50, 0.9
STATES, CLASSES = 195, 120
EOS = eos_of_rows([[0]])
TOKENS, LENGTH = np.arange(64, dtype=np.int32)[None], np.array([32], np.int32)


Part = tuple[Callable[..., Arrays], Arrays]
"""A function of logits [1, N, V] and of a second argument, and that argument."""


def parts(size: int) -> dict[str, Part]:
    """The parts of the sampler, for a vocabulary of `size` tokens."""
    made: dict[str, Part] = {
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
    constrained = Processors.create(1, size, constraint=automaton(size))
    made["a constraint"] = (run_processors, begun(constrained, size))
    made["a user's function"] = (run_function, begun(Processors(), size, counted=True))
    made["noise, shared"] = (shared_noise, jax.random.split(make_key(0), 1))
    made["log-probabilities"] = (lambda x, _: logprobs(x, 0), None)
    made["log-probabilities, best 5"] = (lambda x, _: logprobs(x, 5), None)
    return made


def automaton(size: int) -> Automaton:
    """One of the size of a schema with strings, numbers, choices and a nested object."""
    drawn = np.random.default_rng(0)
    table = drawn.integers(0, STATES, (STATES, CLASSES))
    table = np.where(drawn.random(table.shape) < 0.5, table, ABSENT)
    table[np.arange(STATES - 1), 0] = np.arange(1, STATES)
    accepting = np.arange(STATES) == STATES - 1
    return Automaton(drawn.integers(0, CLASSES, size), table, accepting)


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
    tokens, length = jnp.asarray(TOKENS), jnp.asarray(LENGTH)
    return processors.begin(tokens, length, size, counted, jnp.asarray(EOS))


def state(processors: Processors) -> DecodeState:
    """The fields of a state that processors read."""
    fields = types.SimpleNamespace(
        processors=processors,
        tokens=jnp.asarray(TOKENS),
        length=jnp.asarray(LENGTH),
        limit=jnp.asarray(LENGTH + 512),
        eos=jnp.asarray(EOS),
    )
    return cast(DecodeState, fields)


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
    path = jnp.arange(NODES)[None]
    return Logprobs.measure(x, x, path, jnp.zeros((1, NODES), jnp.int32), top)


class TimedPart(Timed):
    """One part of the sampler."""

    def __init__(self, name: str, part: Part, logits: jax.Array) -> None:
        super().__init__(name, 1)
        self._function, self._argument, self._logits = jax.jit(part[0]), part[1], logits

    def run(self, item: int) -> Sample:
        del item
        started = time.perf_counter()
        jax.block_until_ready(self._function(self._logits, self._argument))
        return Sample(time.perf_counter() - started)


def measure(size: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of each part; NaN if no sample was clean."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, NODES, size)), jnp.float32) * 2.5
    timed = [TimedPart(name, part, logits) for name, part in parts(size).items()]
    first_calls(timed)
    take_turns(timed, rounds)
    return {each.name: math.nan if each.median is None else 1e3 * each.median for each in timed}


@dataclasses.dataclass(frozen=True)
class SamplerOptions(fields.Options):
    """The options of `python -m bench.sampler`."""

    sizes: tuple[int, ...] = fields.option((32_000, 152_000), "vocabulary sizes")
    rounds: int = fields.option(15, "measured rounds, after one that compiles")


def main() -> None:
    arguments = parse(SamplerOptions, None, __doc__, "python -m bench.sampler")
    columns = [measure(size, arguments.rounds) for size in arguments.sizes]
    head = describe()
    print(
        f"{head['device']}, {head['cores']} cores, jax {head['jax']}, {NODES} nodes, milliseconds"
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
