"""The cache is a transaction: staged and committed slots equal those of a plain pass."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trees
from toys import TRANSFORMERS as toys

from specjax import tree
from specjax.caches.kv import KVCache, stage, visible_slots
from specjax.kernels import MOST_TOKENS, usable

CAPACITY = 24
PARENTS = np.array(
    [[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 2, 3, 4], [-1, 0, 1, 0, 3, 1], [-1, 0, -1, 1, 1, -1]], np.int32
)
TREES = np.array(
    [[3, 7, 9, 2, 4, 7], [1, 5, 5, 2, 8, 6], [0, 9, 1, 3, 1, 2], [7, 6, 0, 2, 5, 0]], np.int32
)
PATHS = [[0, 2, 5], [0, 1, 2], [0, 3, 4], [0, 1, 4]]
"""A tree per row (breadth first, a chain, depth first, with absent nodes), and a path of three
nodes in each."""

NET = toys.model()


@jax.jit
def read(params, cache, tokens, positions, mask):
    out = NET.apply(params, tokens, positions, cache, mask)
    return out.logits, out.cache


def read_on(cache, tokens, mask=None, depth=None):
    """Stage `tokens` behind what the cache holds."""
    depth = np.arange(tokens.shape[1]) if depth is None else depth
    return read(toys.weights(), cache, jnp.asarray(tokens), cache.length[:, None] + depth, mask)


def prefilled():
    """The ragged prompts, read and committed."""
    cache = NET.init_cache(toys.ROWS, CAPACITY)
    _, cache = read_on(cache, toys.PROMPTS)
    return cache.commit(jnp.asarray(toys.LENGTHS))


def staged():
    parent = jnp.asarray(PARENTS)
    mask, depth = jax.vmap(tree.ancestor_mask)(parent), jax.vmap(tree.depth)(parent)
    return read_on(prefilled(), TREES, mask, depth)


def plainly(row, tokens):
    """Logits after each token of the row's prompt and `tokens`, by one pass without a cache."""
    text = [*toys.PROMPTS[row, : toys.LENGTHS[row]], *tokens]
    padded = np.zeros((1, CAPACITY), np.int32)
    padded[0, : len(text)] = text
    return toys.plain_logits(padded)[0, : len(text)]


def close(actual, wanted):
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


def test_logits_at_a_tree_node_are_those_of_its_path_read_plainly():
    """A node sees the committed text and its own ancestors, at their own positions, and nothing
    else."""
    logits, _ = staged()
    for row in range(toys.ROWS):
        for node in range(TREES.shape[1]):
            if PARENTS[row, node] >= 0 or node == 0:
                path = trees.ancestors(PARENTS[row], node)
                close(logits[row, node], plainly(row, TREES[row, path])[-1])


def test_causal_is_the_chain_mask():
    """A chain needs no mask: None gives the same as the ancestor mask of a chain."""
    parent = jnp.broadcast_to(tree.chain(6), TREES.shape)
    mask = jax.vmap(tree.ancestor_mask)(parent)
    close(read_on(prefilled(), TREES)[0], np.asarray(read_on(prefilled(), TREES, mask)[0]))


def test_a_pass_does_not_move_the_length():
    """Staged slots are scratch until they are committed."""
    _, cache = staged()
    np.testing.assert_array_equal(cache.length, toys.LENGTHS)
    for row in range(toys.ROWS):
        for actual, wanted in zip(
            toys.committed(cache, row), toys.committed(prefilled(), row), strict=True
        ):
            np.testing.assert_array_equal(actual, wanted)


def test_commit_by_path_keeps_what_reading_the_path_would_have_staged():
    """Keys and values of the path's nodes move to where a chain would have put them."""
    _, cache = staged()
    cache = cache.commit(jnp.full(toys.ROWS, 3), jnp.array(PATHS))
    _, plain = read_on(prefilled(), np.take_along_axis(TREES, np.array(PATHS), axis=1))
    plain = plain.commit(jnp.full(toys.ROWS, 3))
    np.testing.assert_array_equal(cache.length, toys.LENGTHS + 3)
    for row in range(toys.ROWS):
        for actual, wanted in zip(
            toys.committed(cache, row), toys.committed(plain, row), strict=True
        ):
            close(actual, wanted)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_going_on_after_a_commit_is_as_if_never_speculated(count):
    """Whatever part of a tree is committed, the next tokens are read as behind the plain text."""
    _, cache = staged()
    cache = cache.commit(jnp.full(toys.ROWS, count), jnp.array(PATHS))
    more = TREES[:, ::-1]
    logits, _ = read_on(cache, more)
    for row in range(toys.ROWS):
        kept = TREES[row, PATHS[row]][:count]
        close(logits[row], plainly(row, [*kept, *more[row]])[-more.shape[1] :])


def test_commit_of_the_first_tokens_moves_nothing():
    """Committing a chain only advances the length; rows may commit different counts."""
    _, cache = read_on(prefilled(), TREES)
    count = np.array([0, 2, 5, 6])
    kept = cache.commit(jnp.asarray(count))
    np.testing.assert_array_equal(kept.length, toys.LENGTHS + count)
    for actual, wanted in zip(
        (*kept.keys, *kept.values), (*cache.keys, *cache.values), strict=True
    ):
        assert actual is wanted


def test_committing_a_prefix_path_equals_committing_the_first_tokens():
    """The two ways to commit a chain give the same committed slots."""
    _, cache = read_on(prefilled(), TREES)
    first = cache.commit(jnp.full(toys.ROWS, 3))
    by_path = cache.commit(jnp.full(toys.ROWS, 3), jnp.broadcast_to(jnp.arange(3), (toys.ROWS, 3)))
    for row in range(toys.ROWS):
        for actual, wanted in zip(
            toys.committed(by_path, row), toys.committed(first, row), strict=True
        ):
            np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize("masked", [False, True])
def test_visible_slots_by_definition(masked):
    """A staged token sees every committed slot and the staged slots in its mask row, and no
    scratch."""
    rng = np.random.default_rng(0)
    length, width, capacity = np.array([0, 3, 7, 1]), 5, 12
    mask = (
        rng.random((4, width, width)) < 0.5
        if masked
        else np.broadcast_to(np.tri(width, dtype=bool), (4, width, width))
    )
    visible = np.asarray(
        visible_slots(jnp.asarray(length), width, capacity, jnp.asarray(mask) if masked else None)
    )
    for b, n, s in np.ndindex(4, width, capacity):
        behind = s - length[b]
        assert visible[b, n, s] == (behind < 0 or (behind < width and mask[b, n, behind]))


def test_chunks_by_definition():
    """A token sees the text from the last multiple of the window on, and a node of a tree is at its
    depth."""
    length, window = np.array([0, 3, 4, 7, 9]), 4
    parent = jnp.array([-1, 0, 0, 1, 3])
    width, mask = len(parent), np.asarray(tree.ancestor_mask(parent))
    places = length[:, None] + np.asarray(tree.depth(parent))
    cache = KVCache.zeros(1, len(length), 1, 16, 1, jnp.float32)
    cache = dataclasses.replace(cache, length=jnp.asarray(length))
    visible = np.asarray(
        cache.visible(jnp.asarray(places), jnp.asarray(mask)[None], window, chunked=True)
    )
    for b, n, s in np.ndindex(*visible.shape):
        behind = s - length[b]
        seen = behind < 0 or (behind < width and mask[n, behind])
        place = places[b, behind] if 0 <= behind < width else s
        assert visible[b, n, s] == (seen and place >= places[b, n] // window * window)


def test_one_mask_serves_every_row():
    """A mask [1, N, N] is broadcast to all rows."""
    mask = jnp.asarray(np.random.default_rng(1).random((1, 4, 4)) < 0.5)
    length = jnp.array([0, 2, 5])
    np.testing.assert_array_equal(
        visible_slots(length, 4, 9, mask), visible_slots(length, 4, 9, jnp.repeat(mask, 3, axis=0))
    )


@pytest.mark.parametrize("rows", [1, 16, 17])
def test_stage_writes_each_row_at_its_own_start(rows):
    """Small and large batches write the same slots by different code, and leave the rest
    unchanged."""
    rng = np.random.default_rng(2)
    buffer = rng.normal(size=(rows, 2, 9, 3)).astype(np.float32)
    new = rng.normal(size=(rows, 2, 4, 3)).astype(np.float32)
    start = rng.integers(0, 6, rows)
    start[-1] = 5  # up to the very last slot
    wanted = buffer.copy()
    for b in range(rows):
        wanted[b, :, start[b] : start[b] + 4] = new[b]
    np.testing.assert_array_equal(jax.jit(stage)(buffer, new, jnp.asarray(start)), wanted)


def test_stage_casts_to_the_type_of_the_cache():
    """A float32 pass over a bfloat16 cache stores bfloat16."""
    staged = stage(
        jnp.zeros((1, 1, 4, 2), jnp.bfloat16), jnp.full((1, 1, 2, 2), 1.001), jnp.array([1])
    )
    assert staged.dtype == jnp.bfloat16


def test_an_empty_cache_holds_zeros():
    """Zeros, so that a masked slot cannot bring a NaN; each layer has a leaf in the dtype asked
    for."""
    cache = KVCache.zeros(layers=3, batch=2, heads=4, size=5, dim=6, dtype=jnp.bfloat16)
    assert cache.capacity == 6, "one more, where a blank may be staged"
    assert len(cache.keys) == len(cache.values) == 3
    for leaf in (*cache.keys, *cache.values):
        assert leaf.shape == (2, 4, 6, 6)
        assert leaf.dtype == jnp.bfloat16
        assert not leaf.any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("rows", "by_kernel"), [(1, False), (1, True), (2, False), (2, True), (17, False)]
)
def test_what_writes_the_slots(dtype, rows, by_kernel):
    """A few rows are written by slices, in place; 16-bit numbers of several rows as integers, which
    XLA on a CPU does not convert, or by a kernel; a single token beside a spare slot as two."""
    buffer, start = jnp.zeros((rows, 1, 4, 2), dtype), jnp.zeros(rows, jnp.int32)
    for width, spare in ((1, True), (1, False), (2, True)):
        new = jnp.ones((rows, 1, width, 2), dtype)
        traced = jax.jit(functools.partial(stage, spare=spare, by_kernel=by_kernel)).trace(
            buffer, new, start
        )
        text = traced.lower().as_text()
        halves = dtype != jnp.float32
        kernel = by_kernel and halves and usable()
        assert ("specjax_writing_slots" in text) == kernel
        assert ("scatter" in text) == (rows > 16)
        assert ("dynamic_update_slice" in text) == (rows <= 16 and not kernel)
        assert ("ui16" in text) == (halves and 1 < rows <= 16 and not kernel)
        assert ("stablehlo.pad" in text) == (spare and width == 1 and not kernel)
        # A GPU would launch a kernel for the slice of each row; a scatter is one for all rows.
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert ("scatter" in text) == (rows > 1)
        assert "ui16" not in text and "stablehlo.pad" not in text and "writing" not in text


@pytest.mark.skipif(not usable(), reason="there are no kernels for this processor")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 5), (3, 1), (3, 8)])
def test_a_kernel_writes_as_slices_do(dtype, rows, width):
    """Every slot has the bits that a slice update gives it, and a loop that donates its buffer
    copies none."""
    keys = jax.random.split(jax.random.key(rows * width), 2)
    buffer = jax.random.normal(keys[0], (rows, 2, 40, 3)).astype(dtype)
    new = jax.random.normal(keys[1], (rows, 2, width, 3)).astype(dtype)
    start = jnp.arange(rows, dtype=jnp.int32) * 7 + 2

    def twice(by_kernel, buffer):
        def turn(i, held):
            return stage(held, new * (i + 1).astype(dtype), start + i * width, by_kernel=by_kernel)

        return jax.lax.fori_loop(0, 2, turn, buffer)

    wanted = jax.jit(functools.partial(twice, False))(buffer)
    run = jax.jit(functools.partial(twice, True), donate_argnums=0)
    np.testing.assert_array_equal(run(buffer + 0), wanted)
    text = run.lower(buffer).compile().as_text()
    shape = f" = {'bf16' if dtype == jnp.bfloat16 else 'f16'}[{rows},2,40,3]"
    made = [line for line in text.splitlines() if shape in line]
    assert made and not any(" fusion(" in line or " copy(" in line for line in made)


@pytest.mark.skipif(not usable(), reason="there are no kernels for this processor")
def test_a_kernel_drops_tokens_behind_the_slots():
    """What does not fit is not written elsewhere."""
    buffer, new = jnp.zeros((2, 1, 4, 2), jnp.bfloat16), jnp.ones((2, 1, 3, 2), jnp.bfloat16)
    written = jax.jit(functools.partial(stage, by_kernel=True))(buffer, new, jnp.array([0, 2]))
    np.testing.assert_array_equal(written[:, 0, :, 0], [[1, 1, 1, 0], [0, 0, 1, 1]])


def test_a_kernel_writes_few_tokens():
    """Only a cache that a kernel reads is written by one, a few tokens at once."""
    cache = KVCache.zeros(1, 1, 1, 4 * MOST_TOKENS, 2, jnp.bfloat16).layer(0)
    for by_kernel, width in ((True, 2), (True, 2 * MOST_TOKENS), (False, 2)):
        new = jnp.ones((1, 1, width, 2), jnp.bfloat16)
        made = jax.make_jaxpr(dataclasses.replace(cache, by_kernel=by_kernel).stage)(new, new)
        few = by_kernel and width <= MOST_TOKENS and usable()
        assert ("specjax_writing_slots" in str(made)) == few
