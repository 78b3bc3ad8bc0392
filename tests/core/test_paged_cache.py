"""Caches with pages hold what caches by slot hold, and attention reads them with the same bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_kernels import mask

from specjax import kernels
from specjax.caches import (
    Joint,
    KVCache,
    PagedCache,
    Pages,
    in_pages,
    pools_of,
    with_pages,
    with_table,
    without_pages,
)
from specjax.kernels import available
from specjax.models import attend, cpu_attend

ROWS, HEADS, DIM, PAGE, COUNT = 3, 2, 8, 16, 6


@pytest.fixture(params=["kernels", "XLA"])
def _either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With our kernels, and where there are none."""
    if request.param == "XLA":
        monkeypatch.setattr(available, "made", lambda *of: None)


def pair(dtype: str, rng: np.random.Generator) -> tuple[KVCache, PagedCache]:
    """An empty cache of each kind; rows have their pages in a drawn order, and the last one no
    page for its last tokens."""
    slots = KVCache.zeros(1, ROWS, HEADS, PAGE * COUNT - 1, DIM, dtype)
    paged = with_pages(in_pages(slots, PAGE, COUNT), pools_of(slots, PAGE, ROWS * COUNT + 1))
    table = 1 + rng.permutation(ROWS * COUNT).astype(np.int32).reshape(ROWS, COUNT)
    table[-1, -1] = 0
    paged = with_table(paged, lambda _: jnp.asarray(table))
    assert isinstance(paged, PagedCache)
    return slots, paged


def test_joint_trees_are_those_with_pages():
    """Of a tree with two caches, whose pages are taken out of it and put back."""
    one, other = (pair("float32", np.random.default_rng(seed))[1] for seed in range(2))
    whole = {"first": one, "between": jnp.arange(3), "last": [other]}
    tree, pools = without_pages(whole)
    joint = Joint(tree, pools)
    marked = jax.tree.map(lambda x: x + 1, tree), jax.tree.map(lambda x: x + 2, pools)
    made, expected = joint.join(*marked), with_pages(*marked)
    assert jax.tree.structure(made) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True)
    assert all(a is b for a, b in pairs)
    assert jax.tree.structure(joint.part(made)) == jax.tree.structure((tree, pools))
    pairs = zip(jax.tree.leaves(joint.part(made)), jax.tree.leaves(marked), strict=True)
    assert all(a is b for a, b in pairs)


def joined(pages: Pages) -> np.ndarray:
    return np.asarray(pages.part(0, pages.shape[2]))


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drawn_passes(dtype: str):
    """Staged tokens, paths through trees, and tokens that are taken back."""
    rng = np.random.default_rng(0)
    slots, paged = pair(dtype, rng)
    before = slots, paged
    width = 5
    for turn in range(24):
        new = [jnp.asarray(rng.normal(size=(ROWS, HEADS, width, DIM)), dtype) for _ in range(2)]
        staged = slots.stage(*new), paged.stage(*new)
        slots, paged = slots.with_layers(staged[:1]), paged.with_layers(staged[1:])
        path = jnp.asarray(np.sort(rng.permutation(width)[:3])[None].repeat(ROWS, 0))
        count = jnp.asarray(rng.integers(0, 4, ROWS), jnp.int32)
        if turn % 4 == 3:
            slots, paged = slots.rewind(before[0]), paged.rewind(before[1])
        else:
            before = slots, paged
            slots, paged = slots.commit(count, path), paged.commit(count, path)
        assert slots.length.tolist() == paged.length.tolist()
        for mine, yours in zip(staged[0], staged[1], strict=True):
            made, wanted = joined(yours), np.asarray(mine)
            for row, length in enumerate(before[0].length.tolist()):
                held = length + width if row < ROWS - 1 else min(length + width, PAGE * (COUNT - 1))
                assert (made[row, :, :held] == wanted[row, :, :held]).all()
        assert not np.asarray(paged.keys[0][0], np.float32).any()  # the page that nobody has
    seen = slots.visible(slots.next_positions(width))
    assert (seen == paged.visible(paged.next_positions(width))).all()


@pytest.mark.parametrize(
    ("page", "dtype", "dim"), [(16, "float32", 20), (64, "float32", 32), (128, "bfloat16", 64)]
)
def test_the_kernel_has_the_bits_of_joined_pages(page: int, dtype: str, dim: int):
    rng = np.random.default_rng(1)
    count, width, heads = 256 // page, 4, 4
    table = rng.permutation(np.arange(1, 3 * count + 1)).reshape(3, count).astype(np.int32)
    pools = [jnp.asarray(rng.normal(size=(3 * count + 1, 2, page, dim)), dtype) for _ in range(2)]
    keys, values = (Pages(pool, jnp.asarray(table)) for pool in pools)
    query = jnp.asarray(rng.normal(size=(3, width, heads, dim)), jnp.float32)
    assert kernels.takes_pages(query, keys.pool, None)
    for kind in ("tree", "window"):
        seen = jnp.asarray(mask(kind, 3, width, 256))
        whole = (jnp.asarray(joined(part)) for part in (keys, values))
        wanted = cpu_attend(query, *whole, seen)
        made = cpu_attend(query, keys, values, seen)
        assert np.asarray(made).tobytes() == np.asarray(wanted).tobytes()
        others = np.asarray(attend(query, keys, values, seen), np.float32)
        np.testing.assert_allclose(others, np.asarray(made, np.float32), atol=0.02)


def test_pages_are_written_in_place():
    """A step that writes one token copies no pages: on a CPU, and by XLA's scatter."""
    slots, paged = pair("float32", np.random.default_rng(0))
    big = pools_of(slots, PAGE, 4096)

    def steps(cache: PagedCache) -> PagedCache:
        def step(_: int, cache: PagedCache) -> PagedCache:
            new = jnp.ones((ROWS, HEADS, 1, DIM))
            keys, values = cache.stage(new, new)
            mixed = cpu_attend(
                jnp.ones((ROWS, 1, HEADS, DIM)), keys, values, cache.visible(cache.length[:, None])
            )
            moved = (mixed.sum() < 1e9).astype(jnp.int32)
            return cache.with_layers([(keys, values)]).commit(jnp.full(ROWS, moved))

        return jax.lax.fori_loop(0, 8, step, cache)

    program = jax.jit(steps, donate_argnums=0).lower(with_pages(paged, big)).compile()
    analysis = program.memory_analysis()
    assert analysis is not None
    one = big[0][0][0].nbytes
    assert analysis.temp_size_in_bytes < one / 8, analysis
    assert analysis.alias_size_in_bytes >= 2 * one
