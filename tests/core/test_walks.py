"""Single walks: what `rejection` and `block` decide in edge cases and by their formulas, on a
path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import (
    SHAPES,
    WALKS,
    ForcedTokens,
    ForcedUniform,
    enable_x64,
    judged_by,
    prefix,
    tables,
)

from specjax import RULES, Proposal
from specjax.tree import Tree


def walk(uniform, parent, tokens, target, draft, rule="rejection"):
    with enable_x64(True):
        proposal = Proposal(jnp.array(tokens, jnp.int32), jnp.array(parent, jnp.int32), None)
        draft = None if draft is None else jnp.array(draft)
        verdict = jax.jit(WALKS[rule])(jnp.array(uniform), proposal, jnp.array(target), draft)
        return tuple(map(np.asarray, verdict))


@pytest.mark.parametrize("rule", WALKS)
def test_a_draft_of_zero_draft_mass_is_never_accepted(rule):
    """It was not drawn, and u * 0 < p would accept it for any u."""
    target = np.full((2, 4), 0.25)
    draft = np.array([[0.5, 0.5, 0.0, 0.0]] * 2)
    node, residual, chance = walk([0.0, 0.0], (-1, 0), (0, 2), target, draft, rule)
    assert node == 0
    assert chance.tolist() == [1, 1 if rule == "rejection" else 0]
    np.testing.assert_allclose(residual, target[0])


@pytest.mark.parametrize(
    ("uniform", "wanted", "rest"),
    [(0.3, 2, [0.25, 0.25, 0.25, 0.25]), (0.4, 0, [0.5, 0, 0, 0.5])],
)
def test_a_sibling_after_the_whole_draft_mass_is_a_point_mass(uniform, wanted, rest):
    """A one-hot draft has one draft token.  A sibling beside it was not drawn, so it is accepted
    with the mass that the target has left for it, here 1 / 3."""
    target = np.full((3, 4), 0.25)
    draft = np.eye(4)[[1, 1, 1]]
    node, residual, chance = walk([0.0, 1.0, uniform], (-1, 0, 0), (0, 1, 2), target, draft)
    assert node == wanted
    np.testing.assert_allclose(chance[2], 1 / 3)
    np.testing.assert_allclose(residual, rest)


@pytest.mark.parametrize("drawn_from", ["logits", "point mass"])
@pytest.mark.parametrize("rule", WALKS)
def test_an_empty_residual_falls_back_to_the_target(rule, drawn_from):
    """Rejected by rounding only, where draft and target are equal: the target itself is the
    right answer."""
    target = np.array([[0.0, 1.0, 0.0]] * 2)
    draft = target if drawn_from == "logits" else None
    node, residual, chance = walk([1.0, 1.0], (-1, 0), (0, 1), target, draft, rule)
    assert node == 0
    assert chance[1] == 1
    np.testing.assert_array_equal(residual, target[0])


def test_walk_accepts_as_often_as_it_says():
    """`chance` is the decision: following u < chance by hand leads to the same node."""
    rng = np.random.default_rng(3)
    parent, tokens = (-1, 0, 0, 1, 1, 2, 4), (0, 1, 3, 0, 2, 1, 3)
    seen = set()
    for _ in range(60):
        uniform = rng.random(7)
        target, draft = rng.dirichlet(np.ones(5), 7), rng.dirichlet(np.ones(5), 7)
        node, _, chance = walk(uniform, parent, tokens, target, draft)
        at = 0
        for n in range(1, 7):
            if parent[n] == at and uniform[n] < chance[n]:
                at = n
        assert node == at
        seen.add(int(node))
    assert len(seen) >= 5


def test_block_weighs_as_the_paper_says():
    """Algorithm 2, equation 4, in plain code: weights, chances, the longest accepted prefix, and
    its residual."""
    rng = np.random.default_rng(4)
    seen = set()
    for _ in range(40):
        uniform, tokens = rng.random(5), rng.integers(0, 4, 5)
        target, draft = rng.dirichlet(np.ones(4), 5), rng.dirichlet(np.ones(4), 5)
        end = int(rng.integers(1, 5))  # the rest of the chain is absent
        parent = [n - 1 if n <= end else -1 for n in range(5)]
        node, residual, chance = walk(uniform, parent, tokens, target, draft, "block")
        weight, kept, left = 1.0, 0, np.maximum(target[0] - draft[0], 0)
        for n in range(1, end + 1):
            weight = min(1, weight * target[n - 1, tokens[n]] / draft[n - 1, tokens[n]])
            rest = np.maximum(weight * target[n] - draft[n], 0)
            wanted = weight if n == end else rest.sum() / (rest.sum() + 1 - weight)
            assert chance[n] == pytest.approx(wanted, abs=1e-12)
            if uniform[n] < wanted:
                kept, left = n, target[n] if n == end else rest
        assert node == kept
        np.testing.assert_allclose(residual, left / left.sum(), atol=1e-12)
        assert (chance[end + 1 :] == 0).all()
        seen.add((kept, end))
    assert len(seen) >= 10


@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if RULES[rule].exact and judged_by(rule, ("breadth first",))]
)
def test_the_verdict_is_a_node_of_the_tree(rule):
    """It is the last accepted node; the tree knows its path and depth."""
    vocab, parent = SHAPES["breadth first"]
    target, _ = tables(vocab)
    p = [list(map(target, (prefix(parent, (0, 1, 2, 0, 1), n) for n in range(5))))]
    p, tokens = np.repeat(p, 4, axis=0), np.array([[0, 1, 2, 0, 1]] * 4)
    if RULES[rule].shared_noise:
        draw = ForcedTokens(
            jnp.array([[0, 0, 0, 0, 0], [1, 1, 0, 2, 2], [2, 0, 1, 0, 2], [2, 1, 0, 0, 0]]), vocab
        )
    else:
        uniform = jnp.array([[0, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 1, 0, 1, 0], [0, 1, 0, 1, 1]])
        draw = ForcedUniform(uniform, jnp.array([0, 1, 2, 0]), vocab)
    up = jnp.array(parent, jnp.int32)
    tree = jax.device_get(jax.jit(lambda up: Tree.of(up, 2))(up))
    judge = jax.jit(
        jax.vmap(
            lambda d, t, logits: RULES[rule]()(d, Proposal(t, up, point_mass=True), tree, logits)
        )
    )
    verdict = judge(draw, jnp.array(tokens, jnp.int32), jnp.log(jnp.array(p, jnp.float32)))
    assert tree.path[verdict.node].tolist() == [[0, 0, 0], [0, 1, 1], [0, 2, 4], [0, 2, 2]]
    assert tree.depth[verdict.node].tolist() == [0, 1, 2, 1]
    assert {x.dtype for x in jax.tree.leaves(verdict)} == {jnp.dtype("int32")}
