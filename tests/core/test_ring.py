"""A layer with a window keeps only that window, and the text does not change."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import TRANSFORMERS as toys

import specjax
from specjax.caches import prefill
from specjax.caches.ring import WindowedCache
from specjax.decoding import _run
from specjax.parallel.sharding import layout
from specjax.proposers import DynamicTree, EarlyExitSource

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
    "chain": lambda: (specjax.DraftModel(model(), toys.VOCAB, 4), toys.weights(noise=toys.NOISE)),
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


@pytest.mark.parametrize("case", PROPOSERS)
def test_the_text_is_that_of_a_full_cache(case, monkeypatch):
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


@pytest.mark.parametrize(("width", "rows"), [(1, 3), (2, 3), (5, 17), (7, 3)])
def test_a_ring_by_definition(width, rows):
    """Each token sees the last `window` tokens of its text, wherever the ring holds them, and no
    scratch or margins.

    Passes of any width follow each other; only some of their tokens are committed, and the others
    are read again.
    """
    window, ahead, widest = 4, 5, 7
    rng = np.random.default_rng(width)
    cache = WindowedCache.zeros(1, rows, 1, 64, 1, jnp.float32)
    cache = dataclasses.replace(cache, windows=(window,)).narrow(ahead, widest)
    assert cache.keys[0].shape[2] == window + widest + 2 * ahead

    @jax.jit
    def turn(cache, places, count):
        new = (places + 1.0)[:, None, :, None]
        keys, values = cache.layer(0).stage(new, -new)
        seen = cache.layer(0).visible(places, None, window)
        return (
            dataclasses.replace(cache, keys=(keys,), values=(values,)).commit(count),
            keys,
            values,
            seen,
        )

    for _ in range(24):
        at = np.asarray(cache.length)[:, None]
        places = at + np.arange(width)
        count = rng.integers(0, width + 1, rows)
        cache, keys, values, seen = turn(cache, jnp.asarray(places), jnp.asarray(count, jnp.int32))
        np.testing.assert_array_equal(keys, -np.asarray(values))
        held = np.asarray(keys)[:, 0, :, 0] - 1
        for b, n in np.ndindex(rows, width):
            expected = range(max(0, places[b, n] - window + 1), places[b, n] + 1)
            assert sorted(held[b, seen[b, n]]) == list(expected), (b, n)


def test_a_path_is_kept_where_the_ring_turns():
    """Tree nodes that are staged over the end of the ring move to where a chain would have put
    them."""
    window, ahead = 3, 4
    for start in (0, 4, 5, 13):
        cache = WindowedCache.zeros(1, 1, 1, 64, 1, jnp.float32)
        cache = dataclasses.replace(cache, windows=(window,), length=jnp.array([start])).narrow(
            ahead, ahead
        )
        new = jnp.array([10.0, 11, 12, 13])[None, None, :, None]
        keys, values = cache.layer(0).stage(new, new)
        cache = dataclasses.replace(cache, keys=(keys,), values=(values,)).commit(
            jnp.array([3]), jnp.array([[0, 2, 3]])
        )
        slots = ahead + (start + np.arange(3)) % (window + ahead)
        np.testing.assert_array_equal(cache.keys[0][0, 0, slots, 0], [10, 12, 13])


def test_where_a_ring_saves_nothing_there_is_none():
    """The cache is then the same, slot by slot, as one without windows."""
    plain = jax.eval_shape(lambda: prefill.empty_cache(toys.model(), 2, 64, 4))
    windowed = jax.eval_shape(lambda: prefill.empty_cache(model((16, None)), 2, 64, 4))
    assert jax.tree.leaves(plain) == jax.tree.leaves(windowed)
    assert windowed.rings == (None, None)
