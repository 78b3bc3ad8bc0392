"""Decoders whose target has a layer with a window, and the law that its text is that of a full
cache."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from toys import TRANSFORMERS as toys

import specjax
from specjax.caches import prefill
from specjax.caches.sliding_window import WindowedCache
from specjax.decoding.decoder import _run
from specjax.methods import EarlyExitSource
from specjax.parallel.sharding import layout
from specjax.proposers import DynamicTree

WINDOW, CHUNK, CAPACITY, WIDTH = 16, 12, 160, 40
LENGTHS = np.array([40, 3, 27, 13], np.int32)
PROMPTS = np.random.default_rng(0).integers(1, toys.VOCAB, (toys.ROWS, WIDTH)).astype(np.int32)
LIMITS = np.array([CAPACITY, CAPACITY, 90, 150], np.int32)


def model(windows=(WINDOW, None)):
    config = toys.model(num_layers=len(windows)).module.config
    return specjax.LinenModel(
        specjax.Transformer(
            dataclasses.replace(config, windows=windows, max_positions=CAPACITY + 16)
        )
    )


TARGET, WEIGHTS = model(), toys.weights()
DRAFT = model((WINDOW - 4,))
PROPOSERS = {
    "none": lambda: (specjax.NoProposer(), None),
    "n-gram": lambda: (specjax.NGram(3, min_ngram=1), None),
    "chain": lambda: (specjax.DraftModel(model(), toys.VOCAB, 4), toys.weights(noise=toys.noise)),
    "tree": lambda: (specjax.DraftTree(DRAFT, toys.VOCAB, (2, 2)), toys.truncated()),
    "early exit": lambda: (specjax.EarlyExit(TARGET, 1, 3), WEIGHTS),
    "early exit tree": lambda: (DynamicTree(EarlyExitSource(TARGET, 1), 3, 2, 6), WEIGHTS),
}


def decoder(case, capacity=CAPACITY):
    proposer, arrays = PROPOSERS[case]()
    return specjax.Decoder(TARGET, proposer, specjax.Match(), (), capacity), specjax.Params(
        WEIGHTS, arrays
    )


def begin(dec, arrays, rows=slice(None), width=WIDTH):
    temperature = np.array([0.8, 0, 0.8, 0.8], np.float32)[rows]
    return dec.prefill(
        arrays,
        PROMPTS[rows, :width],
        LENGTHS[rows],
        limit=LIMITS[rows],
        sampling=specjax.Sampling.create(len(temperature), temperature),
        key=toys.keys()[rows],
    )


@functools.cache
def wanted():
    """Plain decoding that keeps all slots of every layer and reads the prompts at once."""
    # The capacity is one that no other test has compiled.
    dec, arrays = decoder("none", CAPACITY + 1)
    state = begin(dec, arrays)
    assert not any(state.cache.rings), "nothing is saved where a chunk is wider than the text"
    return toys.texts(dec.run(arrays, state))


def layers(state):
    """Keys of the layers with a window and of those without, for every cache in a state."""
    caches = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, WindowedCache))
    caches = [x for x in caches if isinstance(x, WindowedCache)]
    pairs = [pair for cache in caches for pair in zip(cache.windows, cache.keys, strict=True)]
    return [keys for window, keys in pairs if window], [
        keys for window, keys in pairs if not window
    ]


def check(case, monkeypatch):
    """Ragged rows, prompts of several chunks, and a ring that wraps several times; no step
    copies it."""
    expected = wanted()
    monkeypatch.setattr(prefill, "CHUNK", CHUNK)
    dec, arrays = decoder(case)
    state = begin(dec, arrays)
    narrow, full = layers(state)
    assert narrow and max(x.shape[2] for x in narrow) < CAPACITY // 2
    assert all(x.shape[2] > CAPACITY for x in full)
    steps = jnp.int32(2**31 - 1)
    compiled = _run.lower(dec, layout(state), arrays, state, steps).compile()
    program, shapes = compiled.as_text() or "", {x.shape for x in (*narrow, *full)}
    for shape in shapes:
        buffer = re.escape(f"f32[{','.join(map(str, shape))}]")
        assert re.search(buffer, program)
        assert not re.search(rf"= {buffer}\S* copy\(", program), shape
    assert toys.texts(compiled(arrays, state, steps)) == expected
    if case != "chain":
        return
    # A row from another prefill of a shorter prompt is inserted into a ring that has wrapped.
    state = dec.run(arrays, begin(dec, arrays), 12)
    state = dec.insert(state, 2, begin(dec, arrays, slice(1, 2), width=5))
    assert toys.texts(dec.run(arrays, state)) == [*expected[:2], expected[1], expected[3]]
