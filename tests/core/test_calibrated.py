"""`Calibrated` learns the chances of drafts from the text that was committed after them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from table_sources import TableSource
from toys import TABLES as toys

import specjax
from specjax import DynamicTree
from specjax.proposers import Calibrated, Chain, Survival
from specjax.proposers.combine import ranked, right_nodes
from specjax.types import ABSENT, Proposal

TREE = np.array([ABSENT, 0, 0, 1, 1, 2, ABSENT], np.int32)
TOKENS = np.array([9, 4, 5, 6, 7, 6, 6], np.int32)


@pytest.mark.parametrize(
    ("text", "pending", "right"),
    [
        ([9, 4, 7], 3, [0, 1, 4]),  # two accepted drafts
        ([9], 5, [0, 2]),  # a draft that the target never read is right if the text has it
        ([9], 8, [0]),
        ([9, 5, 6], 6, [0, 2, 5]),
        ([], 4, []),  # a row that is done
    ],
)
def test_the_nodes_that_the_text_went_through(text, pending, right):
    padded = np.zeros((1, 4), np.int32)
    padded[0, : len(text)] = text
    found, depth = right_nodes(
        jnp.array(TOKENS[None]), jnp.array(TREE[None]), jnp.array(padded),
        jnp.array([len(text)]), jnp.array([pending]),
    )  # fmt: skip
    assert np.flatnonzero(found[0]).tolist() == right
    assert depth[0].tolist() == [0, 1, 1, 2, 2, 2, 0]


def outcomes(rng, steps, numbers):
    """Drafts of two siblings, accepted with the chances of a `Survival` of these numbers."""
    given = np.log(np.sort(rng.uniform(0.02, 0.9, (steps, 1, 2)), axis=2)[..., ::-1])
    true = Survival.start(jnp.array([numbers], jnp.float32))
    chance = jax.vmap(true.chance)(jnp.array(given, jnp.float32)[:, :, None])[:, :, 0]
    right = rng.random(given.shape) < np.exp(chance)
    return jnp.array(given, jnp.float32), jnp.array(right)


@pytest.mark.parametrize("numbers", [(1.0, 0.0, 0.0), (0.4, 0.8, -1.2), (1.8, -0.7, -0.4)])
def test_the_numbers_of_a_row_are_learned(numbers):
    """Also numbers far from those of a source whose probabilities are chances."""
    given, right = outcomes(np.random.default_rng(0), 600, numbers)
    sibling, judged = jnp.array([[False, True]]), jnp.ones((1, 2), bool)

    def step(known, outcome):
        return known.after(outcome[0], sibling, judged, outcome[1]), None

    start = Survival.start(jnp.array([[1.0, 0.0, 0.0]]))
    known, _ = jax.jit(lambda: jax.lax.scan(step, start, (given, right)))()
    wanted = Survival.start(jnp.array([numbers], jnp.float32))
    probe = jnp.log(jnp.array([[[0.8, 0.5], [0.4, 0.1]]]))
    np.testing.assert_allclose(np.exp(known.chance(probe)), np.exp(wanted.chance(probe)), atol=0.1)
    unchanged = start.after(given[0], sibling, ~judged, right[0])
    jax.tree.map(np.testing.assert_array_equal, unchanged, start)


@pytest.mark.parametrize("given", [[-1e-7, -20.0], [-0.7, -0.9], [-3.0, -4.0]])
def test_a_long_text_of_right_drafts_leaves_numbers(given):
    """Sure drafts tell nothing, and what was known before may not fade to 0 / 0."""
    outcome = jnp.array([given]), jnp.array([[False, True]]), jnp.ones((1, 2), bool)
    right = jnp.array([[True, False]])

    def step(known, _):
        return known.after(*outcome, right), None

    start = Survival.start(jnp.array([[1.0, 0.0, 0.0]]))
    known, _ = jax.jit(lambda: jax.lax.scan(step, start, length=20_000))()
    chance = jnp.exp(known.chance(jnp.array([[given]])))[0, 0]
    assert chance[0] > 0.95 and chance[1] < 0.05
    assert jnp.linalg.eigvalsh(known.precision[0]).min() > 1


def test_a_better_sibling_never_has_less_chance():
    """Whatever was learned, so that the best nodes are a tree."""
    rng = np.random.default_rng(1)
    known = Survival.start(jnp.array([[1.0, 0.0, 0.0]]))
    for _ in range(50):
        given = jnp.array(-np.sort(rng.exponential(3, (1, 4))), jnp.float32)
        right = jnp.array(rng.random((1, 4)) < 0.5)
        sibling = jnp.array([[False, True, True, True]])
        known = known.after(given, sibling, jnp.ones((1, 4), bool), right)
        chance = known.chance(given[:, None])[0, 0]
        assert (np.diff(chance) <= 0).all() and (chance < 0).all()


def test_decoding_learns_and_writes_the_same_text():
    """A draft that is mostly wrong is found out, in one program, and each row for itself."""
    case, found = "table dynamic tree, calibrated", {}
    dec, table = toys.decoder(case, "match"), toys.CASES[case][1]
    for name, rows in (("right", table), ("wrong", -table)):
        params = specjax.Params(toys.weights(), rows)
        state = dec.run(params, toys.prefill(dec, params))
        numbers = state.proposer.survival.numbers
        assert (np.abs(numbers - jnp.array([1.0, 0.0, 0.0])).max(1) > 0.01).all()
        probe = jnp.broadcast_to(jnp.log(0.5), (len(numbers), 1, 1))
        found[name] = np.exp(state.proposer.survival.chance(probe)).mean()
        assert toys.texts(state) == toys.decoded("none", "match")[0]
    assert found["wrong"] < found["right"]


def test_what_was_learned_stays_with_its_text():
    """A row that takes over a prompt starts anew, or its drafts would depend on another text."""
    proposer = Calibrated(DynamicTree(TableSource(toys.VOCAB), 2, 2, 4))
    state = proposer.init(None, _prompt(), 16)
    moved = dataclasses.replace(state, survival=Survival.start(jnp.array([[2.0, 1.0, -1.0]])))
    assert proposer.truncate(moved, jnp.array([1]), None) is None  # a source that cannot
    assert proposer.rest(moved).survival is moved.survival


def _prompt():
    return specjax.Block(
        jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1, 4)), jnp.zeros(1, jnp.int32)
    )


def test_ranked_nodes_are_a_tree():
    chance = jnp.array([[1.0, 0.6, 0.3, 0.5, 0.1, 0.2, 0.9]])
    proposal = Proposal(jnp.array(TOKENS[None]), jnp.array(TREE[None]), chance=chance)
    best, place = ranked(proposal)
    np.testing.assert_allclose(best[0], [1.0, 0.6, 0.5, 0.3, 0.2, 0.1, 0.0])
    assert place[0].tolist() == [0, 1, 3, 2, 5, 4, 6]


def test_what_cannot_learn_is_refused():
    with pytest.raises(ValueError, match="a Chain does not estimate the chances of its drafts"):
        Calibrated(Chain(TableSource(toys.VOCAB), 2))
    with pytest.raises(ValueError, match="drafter=<a DynamicTree>; pass what load_drafter"):
        specjax.calibrated(DynamicTree(TableSource(toys.VOCAB), 2, 2, 4))
