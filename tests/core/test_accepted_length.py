"""The expected accepted length and its gradient, against enumerated speculative sampling."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.rules import Rejection
from specjax.sampling import IndependentDraw, Sampling, argmax
from specjax.training.accepted import expected_accepted_length
from specjax.training.divergences import acceptance
from specjax.training.losses import log_draft, log_target
from specjax.tree import Tree
from specjax.types import Proposal


def float64(logits):
    logits = np.asarray(logits, np.float64)
    return np.exp(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))


# A toy: the next token of target and draft depends on the previous token only.
SIZE, GAMMA, DRAWS = 6, 3, 100_000
TABLES = jax.random.normal(jax.random.key(7), (2, SIZE, SIZE)) * 1.5
SETTINGS = {
    "plain": Sampling.create(1),
    "warm": Sampling.create(1, 0.8),
    "filtered": Sampling.create(1, 1.2, top_k=5, top_p=0.9),
    "smaller vocabulary": Sampling.create(1),  # the draft's vocabulary lacks the last two tokens
}


def toy(name):
    """Log-probabilities [V, V] of target and draft, with filters on the target only, as in the
    loss."""
    draft = TABLES[1].at[:, 4:].set(-jnp.inf) if name == "smaller vocabulary" else TABLES[1]
    return log_target(TABLES[0], SETTINGS[name]), log_draft(draft, SETTINGS[name])


@jax.jit
def _speculate(log_p, log_q):

    def one(key):
        draw = IndependentDraw(key, SIZE, GAMMA + 1)
        tokens = [jnp.int32(0)]
        for node in range(GAMMA):
            at = jnp.array([node])
            tokens.append(argmax(log_q[tokens[-1]] + draw.noise(at, at)[0]))
        tokens = jnp.stack(tokens)
        proposal = Proposal(tokens, jnp.arange(GAMMA + 1) - 1, log_q[tokens])
        return Rejection()(draw, proposal, Tree.of(proposal.parent, GAMMA), log_p[tokens]).node

    return jax.vmap(one)(jax.random.split(jax.random.key(1), DRAWS))


@functools.cache
def speculate(name):
    """The number of accepted drafts in each of DRAWS steps of the library's rule, from token 0."""
    return np.asarray(_speculate(*toy(name)))


@pytest.mark.parametrize("name", SETTINGS)
def test_accepted_drafts_are_the_overlap(name):
    """The acceptance rate of 100 000 first drafts is sum_v min(p, q), within three standard
    errors."""
    log_p, log_q = toy(name)
    alpha = float(acceptance(log_p[0], log_q[0]))
    accepted = (speculate(name) > 0).mean()
    assert abs(accepted - alpha) < 3 * (alpha * (1 - alpha) / DRAWS) ** 0.5


@jax.jit
def over_target_text(log_p, log_q):
    """E[N] as the loss computes it: every text of the target, weighed by its probability."""
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    texts = np.array([(0, *rest) for rest in itertools.product(range(SIZE), repeat=GAMMA)])
    before, after = texts[:, :-1], texts[:, 1:]
    ratio, alpha = jnp.minimum(1, q / p)[before, after], jnp.minimum(p, q).sum(1)[before]
    limit = jnp.full(len(texts), GAMMA)
    length, counts = expected_accepted_length(ratio, alpha, jnp.ones(before.shape), limit, GAMMA)
    assert length.shape == counts.shape == (len(texts), 1)
    return jnp.sum(jnp.prod(p[before, after], axis=1) * length[:, 0])


def over_drafts(log_p, log_q, root=0, end=None):
    """E[N] of speculative sampling: every chain of drafts, weighed by its probability. Drafts
    behind an accepted `end` are never committed."""
    p, q = np.exp(np.asarray(log_p, np.float64)), np.exp(np.asarray(log_q, np.float64))
    total = 0.0
    for drafts in itertools.product(range(SIZE), repeat=GAMMA):
        chain = list(itertools.pairwise((root, *drafts)))
        drawn = np.prod([q[pair] for pair in chain])
        last = drafts.index(end) + 1 if end in drafts else GAMMA
        kept = np.cumprod([min(1, p[pair] / q[pair]) if drawn else 0 for pair in chain])
        total += drawn * kept[:last].sum()
    return total


@pytest.mark.parametrize("name", SETTINGS)
def test_the_expected_accepted_length_is_that_of_speculative_sampling(name):
    """Over all texts of the target, over all drafted chains, and in 100 000 steps of the
    library's rule."""
    log_p, log_q = toy(name)
    exact = over_drafts(log_p, log_q)
    assert float(over_target_text(log_p, log_q)) == pytest.approx(exact, rel=1e-5)
    counted = speculate(name)
    assert abs(counted.mean() - exact) < 3 * counted.std() / DRAWS**0.5


def test_the_gradient_of_the_expected_accepted_length():
    """It equals finite differences of the sum over drafted chains, for every logit of the draft."""
    log_p, _ = toy("warm")

    def logits(table):
        return log_draft(table, SETTINGS["warm"])

    of_table = jax.jit(jax.grad(lambda table: over_target_text(log_p, logits(table))))
    gradient = np.asarray(of_table(TABLES[1]))
    table = np.asarray(TABLES[1], np.float64)
    for at in [(0, 0), (0, 3), (1, 2), (4, 5), (5, 5)]:
        ends = []
        for sign in (1, -1):
            moved = table.copy()
            moved[at] += sign * 1e-4
            ends.append(over_drafts(log_p, np.log(float64(moved / 0.8))))
        assert gradient[at] == pytest.approx((ends[0] - ends[1]) / 2e-4, rel=1e-3, abs=1e-6)


END, PLACES = 3, 5


def texts_with_ends(p):
    """Every text of PLACES tokens after token 0, padded after END; its probability, and which
    tokens the target drew."""
    texts = np.array([(0, *rest) for rest in itertools.product(range(SIZE), repeat=PLACES)])
    over = np.cumsum(texts == END, axis=1)[:, :-1] > 0
    texts, over = (x[(texts[:, 1:] * over == 0).all(1)] for x in (texts, over))
    return texts, np.where(over, 1, p[texts[:, :-1], texts[:, 1:]]).prod(1), ~over


def of_texts_with_ends(log_p, log_q, limit):
    """E[N] as the loss computes it: a mean over starts in texts that end or are cut at `limit`."""
    p, q = np.exp(log_p), jnp.exp(log_q)
    texts, chance, drawn = texts_with_ends(p)
    before, after = texts[:, :-1], texts[:, 1:]
    ratio, alpha = jnp.minimum(1, q / p)[before, after], jnp.minimum(p, q).sum(1)[before]
    drawn = drawn & (np.arange(PLACES) < limit)
    limit = jnp.full(len(texts), limit)
    ratio = jnp.where(after == END, 0, ratio)
    length, counts = expected_accepted_length(ratio, alpha, drawn, limit, GAMMA)
    weight = chance[:, None] * counts
    return (weight * length).sum() / weight.sum()


def of_drafts_before_ends(log_p, log_q, limit):
    """E[N] of speculative sampling: a mean over the same starts."""
    texts, chance, drawn = texts_with_ends(np.exp(log_p))
    exact = np.array([over_drafts(log_p, log_q, root, END) for root in range(SIZE)])
    weight = (chance[:, None] * drawn)[:, : limit - GAMMA + 1]
    return (weight * exact[texts[:, : limit - GAMMA + 1]]).sum() / weight.sum()


@pytest.mark.parametrize("limit", [PLACES, PLACES - 1])
def test_chains_that_an_end_cuts_short_count(limit):
    """Value and gradient are exact where texts end and where they are cut. Without the chains
    before an EOS the value is 11 % too large; with those before a cut it is 2 to 4 % too small."""
    (_, log_q), draft = toy("warm"), TABLES[1]
    log_p = jax.nn.log_softmax(TABLES[0].at[:, END].add(2))  # make EOS frequent
    exact = of_drafts_before_ends(log_p, log_q, limit)

    @jax.jit
    @jax.value_and_grad
    def of_table(table):
        return of_texts_with_ends(log_p, log_draft(table, SETTINGS["warm"]), limit)

    length, gradient = map(np.asarray, of_table(draft))
    assert float(length) == pytest.approx(exact, rel=1e-5)
    table = np.asarray(draft, np.float64)
    for at in [(0, 0), (0, END), (1, 2), (4, 5)]:
        ends = []
        for sign in (1, -1):
            moved = table.copy()
            moved[at] += sign * 1e-4
            ends.append(of_drafts_before_ends(log_p, np.log(float64(moved / 0.8)), limit))
        assert gradient[at] == pytest.approx((ends[0] - ends[1]) / 2e-4, rel=2e-3, abs=1e-6)


def test_chains_start_where_the_target_drew():
    """Chains stop at EOS and do not count at a cut; with one draft, 1 - E[N] is total variation."""
    ratio, alpha = jnp.full((2, 6), 0.5), jnp.full((2, 6), 0.8)
    drawn, limit = jnp.array([[0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 0, 0]]), jnp.array([6, 4])
    length, counts = expected_accepted_length(ratio, alpha, drawn, limit, 2)
    assert counts.tolist() == [[0, 1, 1, 1, 0], [0, 1, 1, 0, 0]]
    np.testing.assert_allclose(length[0, 1:4], [0.8 + 0.5 * 0.8, 0.8 + 0.5 * 0.8, 0.8], rtol=1e-6)
    of_one = expected_accepted_length(ratio, alpha, drawn, limit, 1)[0]
    np.testing.assert_allclose(of_one, alpha * drawn)
