"""The best tree of choices for measured ranks, and the measurement of these ranks."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heads import HEAD, by_hand
from toys import TABLES as toys

from specjax import Medusa, tree
from specjax.methods import measure_ranks
from specjax.proposers import best_tree, expected_length, node_acceptance


def brute_force(ranks, num_nodes):
    """The most hits of any tree of at most `num_nodes` nodes, over every closed set of choices."""
    depths, width = ranks.shape[1], int(ranks.max()) + 1
    paths = [path for d in range(depths) for path in itertools.product(range(width), repeat=d + 1)]
    hits = {path: int((ranks[:, : len(path)] == path).all(1).sum()) for path in paths}

    def closed(chosen):
        nodes = set(chosen)
        return all(
            (len(c) == 1 or c[:-1] in nodes) and (c[-1] == 0 or (*c[:-1], c[-1] - 1) in nodes)
            for c in chosen
        )

    return max(
        sum(hits[c] for c in chosen)
        for size in range(num_nodes)
        for chosen in itertools.combinations(paths, size)
        if closed(chosen)
    )


@pytest.mark.parametrize("seed", range(6))
def test_no_tree_is_better(seed):
    """No other tree has more hits, on ranks with arbitrary order and dependence and on decaying
    ranks."""
    rng = np.random.default_rng(seed)
    if seed % 2:
        joint = rng.dirichlet(np.full(9, 0.3)).reshape(
            3, 3
        )  # a worse sibling may be right more often
        picked = rng.choice(9, size=200, p=joint.ravel())
        ranks = np.stack([picked // 3, picked % 3], axis=1)
    else:
        ranks = np.minimum(rng.geometric(0.5, size=(200, 3)) - 1, 1)
    for num_nodes in range(2, 7):
        choices = best_tree(ranks, num_nodes)
        tree.from_choices(choices)
        assert len(choices) < num_nodes
        hits = round((expected_length(ranks, choices) - 1) * len(ranks))
        assert hits == brute_force(ranks, num_nodes)


def test_the_best_tree_is_measured_and_no_product_of_marginals():
    """If the first draft is right exactly when the second head is wrong, no path (0, 0) is
    grown."""
    ranks = np.array([(0, 1), (1, 0)] * 10)
    assert best_tree(ranks, 6) == ((0,), (1,), (0, 0), (0, 1), (1, 0))
    assert best_tree(ranks, 5) == ((0,), (1,), (1, 0))
    assert expected_length(ranks, ((0,), (1,), (0, 0))) == 2.0
    assert node_acceptance(ranks, ((1,), (0,), (1, 0))).tolist() == [1, 0.5, 0.5, 1]


def test_the_best_tree_leaves_out_what_is_never_right():
    """If fewer choices than nodes were ever right, the tree is not filled up."""
    assert best_tree(np.array([[0, 0], [0, 5]]), 4) == ((0,), (0, 0))
    assert best_tree(np.array([[9]]), 4) == ()


def test_of_equal_trees_the_flatter_one_is_taken():
    """A child of the first choice and its sibling are right equally often: the sibling is taken."""
    assert best_tree([[0, 0], [0, 1], [1, 0]], 3) == ((0,), (1,))


def test_ranks_are_those_of_the_tokens_ahead():
    """Row t holds the ranks of the tokens at t + 2 + k in the logits at t; ties go to the lower
    id."""
    texts = toys.greedy_texts()[: toys.ROWS]
    params = toys.noisy_heads(toys.SHARED, 1)
    ranks = measure_ranks(toys.model(), toys.weights(), toys.SHARED, params, HEAD, texts)
    logits = by_hand(toys.SHARED, params, toys.plain_output(texts).hidden)
    places = toys.CAPACITY - 1 - toys.SHARED.num_heads
    assert ranks.shape == (toys.ROWS * places, toys.SHARED.num_heads)
    for row, t, k in itertools.product(
        range(toys.ROWS), (0, 1, places - 1), range(toys.SHARED.num_heads)
    ):
        order = np.argsort(-logits[row, t, k], kind="stable").tolist()
        assert ranks[row * places + t, k] == order.index(texts[row, t + 2 + k])
    tied = jax.tree.map(jnp.zeros_like, params)
    ranks = measure_ranks(
        toys.model(), toys.weights(), toys.SHARED, tied, jnp.zeros_like(HEAD), texts
    )
    assert ranks[0].tolist() == texts[0, 2:4].tolist()


def test_ranks_measured_on_greedy_text_are_acceptance():
    """The ranks of a chain on the target's own text predict the acceptance of decoding it."""
    texts = np.array(toys.decoded("none", "match")[0][:1])
    params = jax.tree.map(lambda leaf: leaf[0], toys.medusa_params(own=True).bank)
    ranks = measure_ranks(toys.model(), toys.weights(), toys.OWN, params, None, texts)
    dec, arrays = toys.decoder("medusa chain", "match"), toys.params("medusa chain")
    state, accepted = toys.prefill(dec, arrays), []
    while not state.done[0]:
        length = int(state.length[0])
        state = dec.run(arrays, state, 1)
        if length + 4 <= texts.shape[1]:  # not cut by the limit
            right = ranks[length - 2] == 0
            accepted.append((int(state.length[0]) - length - 1, int(np.cumprod(right).sum())))
    assert len(accepted) > 5
    assert all(actual == wanted for actual, wanted in accepted)
    assert len({actual for actual, _ in accepted}) > 1


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (((1, 0), (0,)), r"choice \(1, 0\) has no parent: add \(1,\)"),
        (((0,), (2,)), r"choice \(2,\) has no better sibling: add \(1,\)"),
        (((0,), (0, 0), (0, 0, 0)), r"\(0, 0, 0\) lies 3 tokens ahead, and there are 2 heads"),
        (
            tuple((n,) for n in range(toys.VOCAB + 1)),
            r"\(29,\) asks for more drafts than the vocabulary of 29",
        ),
        (((0,), (-1,)), "-1"),
    ],
)
def test_bad_choices_are_refused(choices, message):
    """The error names the choices and the cure."""
    with pytest.raises(ValueError, match=message):
        Medusa(toys.SHARED, choices)


@pytest.mark.parametrize(
    ("stats", "num_nodes", "message"),
    [
        (np.zeros((0, 2), int), 4, r"\[0, 2\].*measure_ranks"),
        (np.zeros(3, int), 4, r"\[3\].*measure_ranks"),
        (np.zeros((3, 2)), 4, "float64"),
        (np.full((3, 2), -1), 4, "whole numbers from 0"),
        (np.zeros((3, 2), int), 1, "num_nodes=1.*at least 2"),
    ],
)
def test_bad_statistics_are_refused(stats, num_nodes, message):
    """The error names the statistics and what to pass."""
    with pytest.raises(ValueError, match=message):
        best_tree(stats, num_nodes)
    if num_nodes == 4 and stats.size:
        with pytest.raises(ValueError, match="texts of 3 tokens; 2 heads need 4"):
            measure_ranks(
                toys.model(), toys.weights(), toys.SHARED, None, HEAD, np.zeros((1, 3), int)
            )
