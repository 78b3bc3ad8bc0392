"""A layer with a window keeps only that window, and the text does not change."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rings
from toys import TRANSFORMERS as toys

from specjax.caches import prefill
from specjax.caches.sliding_window import WindowedCache


def test_the_text_is_that_of_a_full_cache(monkeypatch):
    """Ragged rows, prompts of several chunks, and a ring that wraps several times; no step
    copies it.  The chain's rows are also inserted; `tests/product` has the other proposers."""
    rings.check("chain", monkeypatch)


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
    windowed = jax.eval_shape(lambda: prefill.empty_cache(rings.model((16, None)), 2, 64, 4))
    assert jax.tree.leaves(plain) == jax.tree.leaves(windowed)
    assert windowed.rings == (None, None)
    assert [windowed.layer(i).windows for i in range(2)] == [(16,), (None,)]
    whole = WindowedCache.zeros(1, 1, 1, 64, 1, jnp.float32)
    ahead, widest = 5, 7
    for saved in (0, 1):
        window = whole.capacity - widest - 2 * ahead - saved
        cut = dataclasses.replace(whole, windows=(window,)).narrow(ahead, widest)
        assert whole.capacity - cut.keys[0].shape[2] == saved
        assert (cut.truncate(jnp.array([0])) is None) == bool(saved)
