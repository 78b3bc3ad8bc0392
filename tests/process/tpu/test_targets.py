"""What a step of the targets that people run moves on a TPU: few layers of their published sizes.

Run as `test_compiled.py` says.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import specjax
from bench.compiled.cells import active_bytes
from bench.compiled.chips import chip
from bench.compiled.drafters import DRAFTERS
from bench.compiled.families import published
from bench.compiled.hlo import parse
from bench.compiled.programs import Compiled, compile_loop
from bench.compiled.sizes import config_of, shapes_of
from bench.compiled.traffic import Traffic, host_transfers, traffic
from bench.tpu.slices import devices_of
from specjax import Decoder, Params
from specjax.caches import layer_state
from specjax.models.feed_forward import by_expert

LAYERS = {"qwen3.5-4b": 4, "qwen3.5-35b-a3b": 4, "gpt-oss-20b": 2, "glm-4.7-flash": 2}
"""Target -> its first layers that are compiled: each kind of its layers is among them."""

SMALL = 2**16
"""Bytes of a vector that may be laid anew; no matrix, cache or state is so small."""


def compiled(target: str, drafter: str) -> Compiled:
    shapes = shapes_of(published(target).truncated(LAYERS[target]))
    draft = shapes_of(config_of("tiny", shapes.model.vocab_size))
    sketch = DRAFTERS[drafter](shapes, draft)
    decoder = Decoder(shapes.model, sketch.proposer, specjax.Match(), (2,), 1024)
    params = Params(shapes.params, sketch.params)
    return compile_loop(decoder, params, devices_of(chip("v5e"), 1), 1)


@functools.cache
def once(target: str, drafter: str) -> Compiled:
    return compiled(target, drafter)


def counted(made: Compiled) -> Traffic:
    return traffic(parse(made.text), (made.decoder.target.vocab_size,))


def states_of(made: Compiled) -> list[jax.ShapeDtypeStruct]:
    cache = made.state.cache
    return [layer.state for layer in getattr(cache, "states", ())]


def most_of_a_state(made: Compiled) -> float:
    """The numbers of the largest array that ends like a state, over those of a state."""
    state = states_of(made)[0]
    ends = state.shape[-2:]
    sizes = [
        shape.bytes
        for _, instruction in parse(made.text).executed()
        for shape in instruction.shapes
        if shape.sizes[-2:] == ends and shape.dtype == "f32"
    ]
    return max(sizes) / (4 * state.size)


EACH = pytest.mark.parametrize(
    ("target", "drafter"),
    [
        pytest.param(target, drafter, marks=pytest.mark.xdist_group(target))
        for target in LAYERS
        for drafter in ("none", "ngram", "tree-of-8")
    ],
)


@EACH
def test_a_step_waits_for_no_host_and_moves_nothing_else(target, drafter):
    made = once(target, drafter)
    assert host_transfers(parse(made.text)) == []
    assert [copy for copy in counted(made).copies if copy[1] > SMALL] == []


@EACH
def test_a_state_is_read_twice_and_written_once(target, drafter):
    """By the pass and by its commit; no state is kept for a node, and none is copied.

    The convolutions' columns count too, and XLA may bring a state back from on-chip memory.
    """
    made = once(target, drafter)
    states = states_of(made)
    every = sum(state.size * 4 for state in states)
    assert counted(made).bytes["states"] <= 4 * every  # a copy of each would be 2 more
    assert not states or most_of_a_state(made) == 1


def test_a_state_for_each_node_is_seen(monkeypatch):
    advanced = layer_state.advanced

    def of_each_node(state, keys, updates, totals, count):
        nodes = range(keys.shape[1] + 1)
        each = [advanced(state, keys, updates, totals, jnp.full_like(count, n)) for n in nodes]
        kept = jax.lax.optimization_barrier(jnp.stack(each, 1))
        return jax.vmap(lambda row, n: row[n])(kept, count)

    monkeypatch.setattr(layer_state, "advanced", of_each_node)
    jax.clear_caches()
    made = compiled("qwen3.5-4b", "ngram")
    jax.clear_caches()
    assert most_of_a_state(made) >= 5


@EACH
def test_few_rows_read_few_experts(target, drafter):
    made = once(target, drafter)
    most = 1.2 if drafter == "none" else 1.1
    assert counted(made).weights["target"] <= most * active_bytes(made)


def test_every_expert_that_is_read_is_seen(monkeypatch):
    """XLA reads all experts of gpt-oss for the 4 rows of a token, if nothing fills them up."""
    monkeypatch.setattr(by_expert, "_ROWS_OF_KERNEL", 1)
    jax.clear_caches()
    made = compiled("gpt-oss-20b", "none")
    jax.clear_caches()
    assert counted(made).weights["target"] > 2 * active_bytes(made)
