"""The formulas of `specjax.tree` against walking up from each node."""

import jax
import numpy as np
import pytest
import trees

from specjax import tree

MAX_DEPTH = 9


@pytest.fixture(scope="module")
def forests():
    """[400, N] random parents in topological order, a third of the nodes absent, and extreme
    shapes."""
    rng = np.random.default_rng(0)
    size = MAX_DEPTH + 1
    trees = [
        np.array([-1, *(rng.integers(-n // 3, n) for n in range(1, size))]) for _ in range(400)
    ]
    trees += [tree.chain(size), np.zeros(size, int) - (np.arange(size) == 0), np.full(size, -1)]
    return np.maximum(np.array(trees), -1).astype(np.int32)


def test_ancestor_mask_names_the_nodes_on_the_way_up(forests):
    """mask[n, m] holds if and only if m is n or an ancestor of n."""
    masks = np.asarray(jax.jit(jax.vmap(tree.ancestor_mask))(forests))
    wanted = [
        [np.isin(np.arange(len(p)), trees.ancestors(p, n)) for n in range(len(p))] for p in forests
    ]
    np.testing.assert_array_equal(masks, wanted)


def test_depth_counts_the_steps_up(forests):
    """A node's depth is the number of its proper ancestors; roots and absent nodes have 0."""
    depths = np.asarray(jax.jit(jax.vmap(tree.depth))(forests))
    assert depths.dtype == np.int32
    np.testing.assert_array_equal(
        depths, [[len(trees.ancestors(p, n)) - 1 for n in range(len(p))] for p in forests]
    )


def test_path_lists_the_way_down_padded_with_its_end(forests):
    """path(n) is the nodes from the root to n in order, then n again."""
    nodes = np.arange(MAX_DEPTH + 1)
    paths = jax.jit(
        jax.vmap(jax.vmap(lambda p, n: tree.path(p, n, MAX_DEPTH), (None, 0)), (0, None))
    )
    listed = np.asarray(paths(forests, nodes))
    assert listed.dtype == np.int32
    for parent, rows in zip(forests, listed, strict=True):
        for node, row in zip(nodes, rows, strict=True):
            way = trees.ancestors(parent, node)
            assert row.tolist() == way + [node] * (MAX_DEPTH + 1 - len(way))


def test_a_tree_holds_what_follows_from_its_parents(forests):
    """Depths, ancestors, paths and the tokens on them agree with walking up."""
    record = jax.device_get(
        jax.jit(jax.vmap(lambda parent: tree.Tree.of(parent, MAX_DEPTH)))(forests)
    )
    tokens = np.random.default_rng(1).integers(0, 99, forests.shape, dtype=np.int32)
    texts = np.asarray(jax.jit(jax.vmap(tree.Tree.path_tokens))(record, tokens))
    np.testing.assert_array_equal(record.parent, forests)
    depths, masks = jax.jit(jax.vmap(lambda up: (tree.depth(up), tree.ancestor_mask(up))))(forests)
    np.testing.assert_array_equal(record.depth, depths)
    np.testing.assert_array_equal(record.ancestors, masks)
    for row, parent in enumerate(forests):
        for node in range(len(parent)):
            way = trees.ancestors(parent, node)
            rest = MAX_DEPTH + 1 - len(way)
            assert record.path[row, node].tolist() == way + [node] * rest
            assert texts[row, node].tolist() == [*tokens[row, way[1:]].tolist(), *[-1] * rest]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_chain_needs_no_closure(size):
    """A chain's record equals that of any tree; where it ends early, absent nodes keep their
    index."""
    of = jax.jit(tree.Tree.of, static_argnums=(1, 2))
    whole, general = of(tree.chain(size), size - 1, True), of(tree.chain(size), size - 1, False)
    jax.tree.map(np.testing.assert_array_equal, whole, general)
    ended = of(np.where(np.arange(size) < 2, tree.chain(size), -1), size - 1, True)
    for name in ("depth", "ancestors", "path"):
        np.testing.assert_array_equal(getattr(ended, name), getattr(whole, name))


def test_pruning_takes_what_hangs_below(forests):
    """Unknown nodes and their descendants are removed; the others keep their parents."""
    known = np.random.default_rng(2).random(forests.shape) < 0.7
    pruned = np.asarray(jax.jit(jax.vmap(tree.prune))(forests, known))
    for parent, kept, after in zip(forests, known, pruned, strict=True):
        wanted = [
            up if all(kept[m] for m in trees.ancestors(parent, n)) else -1
            for n, up in enumerate(parent)
        ]
        assert after.tolist() == wanted


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9, 33])
def test_long_chains_are_closed(size):
    """Squaring reaches the root of a chain of any length."""
    parent = tree.chain(size)
    mask, depth = jax.jit(lambda up: (tree.ancestor_mask(up), tree.depth(up)))(parent)
    np.testing.assert_array_equal(mask, np.tri(size, dtype=bool))
    np.testing.assert_array_equal(depth, np.arange(size))


def test_from_choices_orders_by_depth_then_choice():
    """A choice's parent is the choice without its last step, whatever the given order."""
    choices = ((1, 0), (0,), (0, 1), (1,), (0, 0), (0, 1, 0))
    parent = tree.from_choices(choices)
    ordered = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)]
    assert parent.tolist() == [-1] + [ordered.index(choice[:-1]) for choice in ordered[1:]]
    np.testing.assert_array_equal(parent, tree.from_choices(choices[::-1]))
    assert parent.dtype == np.int32


def test_from_choices_of_nothing_is_the_root():
    """The empty tree is autoregressive decoding."""
    assert tree.from_choices(()).tolist() == [-1]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (((0,), (1, 0)), r"\(1, 0\) has no parent: add \(1,\)"),
        (((0,), (0, 0, 0)), r"\(0, 0, 0\) has no parent: add \(0, 0\)"),
        (((0,), (2,)), r"\(2,\) has no better sibling: add \(1,\)"),
        (((0,), (0, 0), (0,)), "distinct"),
        (((0,), ()), "not empty"),
    ],
)
def test_from_choices_refuses_what_is_no_tree(choices, message):
    """The error names a choice without its parent or better sibling, a duplicate, or the empty
    choice."""
    with pytest.raises(ValueError, match=message):
        tree.from_choices(choices)
