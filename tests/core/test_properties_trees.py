"""Drawn trees of up to 64 nodes: their arrays, and what each rule accepts, against naive walks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trees
from enumeration import enable_x64
from hypothesis import given
from naive_walks import MOST, WALKS, a_case
from properties import law, parents, seeds

from specjax import RULES, Proposal, tree
from specjax.types import ABSENT

SIZES = [(2, 1), (17, 16), (64, 9), (64, 63)]
"""Nodes, and the greatest depth."""


@functools.partial(jax.jit, static_argnums=1)
def arrays_of(parent, max_depth, tokens, known, node):
    """All that `specjax.tree` computes from the parents of one row."""
    record = tree.Tree.of(parent, max_depth)
    way = record.path[node]
    return {
        "record": record,
        "texts": record.path_tokens(tokens),
        "pruned": tree.prune(parent, known),
        "asked": tree.asked(parent, way, record.depth[node]),
        "way": tree.path(parent, node, max_depth),
    }


@pytest.mark.parametrize(("size", "max_depth"), SIZES)
def test_the_arrays_of_a_tree_are_those_of_a_walk(size, max_depth):
    """Depths, ancestors, paths, tokens, pruning and judged depths, node by node."""
    deepest, fullest = 0, 0

    @law(40)
    @given(parent=parents(size, max_depth, size), seed=seeds)
    def check(parent, seed):
        nonlocal deepest, fullest
        rng = np.random.default_rng(seed)
        tokens, known = rng.integers(0, 99, size, np.int32), rng.random(size) < 0.8
        at = int(rng.choice(np.flatnonzero((parent >= 0) | (np.arange(size) == 0))))
        made = jax.device_get(arrays_of(parent, max_depth, tokens, known, at))
        ways = [trees.ancestors(parent, node) for node in range(size)]
        for node, way in enumerate(ways):
            rest = [node] * (max_depth + 1 - len(way))
            assert np.flatnonzero(made["record"].ancestors[node]).tolist() == way
            assert made["record"].depth[node] == len(way) - 1
            assert made["record"].path[node].tolist() == way + rest
            texts = tokens[way[1:]].tolist() + [ABSENT] * len(rest)
            assert made["texts"][node].tolist() == texts
            kept = all(known[m] for m in way)
            assert made["pruned"][node] == (parent[node] if kept else ABSENT)
        assert made["way"].tolist() == made["record"].path[at].tolist()
        judged = [bool((parent == node).any()) for node in ways[at]]
        assert made["asked"].tolist() == judged + [False] * (max_depth + 1 - len(judged))
        deepest = max(deepest, *map(len, ways))
        fullest = max(fullest, int((parent >= 0).sum()))

    check()
    assert deepest - 1 >= max_depth / 2
    assert fullest >= (size - 1) * 3 / 4


@pytest.mark.parametrize("size", [2, 17, 64])
def test_a_chain_is_a_tree(size):
    """A chain of any length has the arrays of a tree, up to where it ends."""
    ends = np.arange(1, size + 1)[:, None]
    forest = np.where(np.arange(size) < ends, tree.chain(size), ABSENT)
    of_chain, of_tree = (
        jax.jit(jax.vmap(lambda up, chain=chain: tree.Tree.of(up, size - 1, chain)))(forest)
        for chain in (True, False)
    )
    for short, whole in zip(
        *(jax.tree.leaves(jax.device_get(x)) for x in (of_chain, of_tree)), strict=True
    ):
        for row, end in enumerate(ends[:, 0]):
            np.testing.assert_array_equal(short[row, :end], whole[row, :end])


def test_every_rule_has_a_naive_walk():
    assert {name.partition(",")[0] for name in WALKS} == set(RULES)


@functools.partial(jax.jit, static_argnums=(0, 1))
def judge(rule, max_depth, draw, tokens, parent, target, draft):
    proposal = Proposal(tokens, parent, draft, point_mass=draft is None)
    chain = rule.chain_only
    return rule(draw, proposal, tree.Tree.of(parent, max_depth, chain), target)


@pytest.mark.parametrize(
    ("name", "drawn"),
    [
        (name, drawn)
        for name in WALKS
        for drawn in ([True, False] if WALKS[name][0].wants_logits else [False])
    ],
)
def test_a_verdict_is_that_of_a_naive_walk(name, drawn):
    """The accepted node and the next token of one row, in trees of 64 nodes."""
    rule, walk = WALKS[name]
    size, max_depth = 64, 63 if rule.chain_only else 20
    highest, seen = 0, set()

    @law(150)
    @given(parent=parents(size, max_depth, size if rule.chain_only else MOST), seed=seeds)
    def check(parent, seed):
        nonlocal highest
        if rule.chain_only:  # it ends at the first absent node
            end = int((parent >= 0).sum()) + 1
            parent = np.where(np.arange(size) < end, tree.chain(size), ABSENT).astype(np.int32)
        case = a_case(parent, np.random.default_rng(seed), max_depth, drawn)
        given_ = (case["tokens"], parent, case["target"], case["draft"])
        with enable_x64(True):
            verdict = judge(rule, max_depth, case["draw"], *map(as_array, given_))
        node, token = walk(case)
        assert (int(verdict.node), int(verdict.next_token)) == (node, token)
        highest = max(highest, node)
        seen.add(node)

    check()
    assert highest >= 20, "some accepted node is far back"
    assert len(seen) >= 10


def as_array(x):
    return None if x is None else jnp.asarray(x)
