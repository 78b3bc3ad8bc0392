"""Exact rules keep the target's distribution: every outcome is enumerated with its probability.

The target continues each emission to a fixed length, and the whole joint distribution is compared.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import trees
from enumeration import (
    CHAINS,
    ENUMERATE,
    SHAPES,
    WALKS,
    ForcedTokens,
    GreedyTable,
    SparseTable,
    Table,
    best,
    check,
    continuation,
    drawn,
    enable_x64,
    joint,
    judged_by,
    outcomes,
    tables,
)
from toys import TABLES as toys

from specjax import RULES, Match, Proposal
from specjax.rules import rejection


def test_a_sibling_beyond_the_tokens_that_can_be_drawn_is_accepted():
    """A greedy draft has one such token; its next best one is a function of the text."""
    one, two = jnp.eye(4)[1:3]
    proposal = Proposal(jnp.array([0, 1, 2]), jnp.array([-1, 0, 0]))
    target, draft = jnp.tile(two, (3, 1)), jnp.tile(one, (3, 1))
    node, residual, chance = rejection.walk(jnp.full(3, 0.5), proposal, target, draft)
    assert int(node) == 2
    np.testing.assert_allclose(residual, two)
    np.testing.assert_allclose(chance, [1, 0, 1])


def test_every_exact_rule_is_enumerated():
    """A rule that claims to be exact has a case here."""
    assert set(ENUMERATE) == {name for name, rule in RULES.items() if rule.exact}


@pytest.mark.parametrize(
    ("rule", "shape"), [(rule, shape) for rule in ENUMERATE for shape in judged_by(rule)]
)
def test_drawn_drafts_keep_the_joint_distribution(rule, shape):
    """Drafts are drawn without replacement among siblings, and the emitted text has the target's
    distribution."""
    vocab, parent = SHAPES[shape]
    target, draft = tables(vocab)
    emitted = check(rule, parent, drawn(parent, draft), target, draft)
    ways = [trees.ancestors(parent, n) for n in range(len(parent))]
    assert emitted.num_accepted.max() == max(len(way) - 1 for way in ways if way[0] == 0)


@pytest.mark.parametrize(
    ("rule", "shape"), [(rule, shape) for rule in ENUMERATE for shape in judged_by(rule)]
)
def test_fixed_drafts_keep_the_joint_distribution(rule, shape):
    """The draft's best tokens are point masses, and the emitted text has the target's
    distribution."""
    vocab, parent = SHAPES[shape]
    target, draft = tables(vocab)
    check(rule, parent, best(parent, draft), target, None)


@pytest.mark.parametrize("draft", [SparseTable, GreedyTable])
@pytest.mark.parametrize("target", [Table, SparseTable, GreedyTable])
@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        (rule, shape)
        for rule in ENUMERATE
        for shape in judged_by(rule, ("2 siblings", "breadth first", "chain of 3"))
    ],
)
def test_rows_with_zeros_keep_the_joint_distribution(rule, target, draft, shape):
    """Tokens without mass in filtered and one-hot rows, in target, draft or both, do no harm."""
    vocab, parent = SHAPES[shape]
    target, draft = target(vocab, 1), draft(vocab, 2)
    check(rule, parent, drawn(parent, draft), target, draft)


@pytest.mark.parametrize("rule", ENUMERATE)
def test_a_perfect_draft_keeps_the_joint_distribution(rule):
    """If draft and target agree, the first rejected mass is zero: nothing becomes NaN or biased."""
    vocab, parent = SHAPES[judged_by(rule, ("breadth first", "chain of 3"))[0]]
    target = Table(vocab, 1)
    check(rule, parent, drawn(parent, target), target, target)


@pytest.mark.parametrize("rule", [rule for rule in ENUMERATE if judged_by(rule, ("2 siblings",))])
def test_repeated_point_masses_keep_the_joint_distribution(rule):
    """The same draft twice below one parent gets no second chance."""
    target, _ = tables(4)
    for tokens in ((0, 2, 2), (0, 1, 1)):
        check(rule, (-1, 0, 0), [(tokens, 1.0)], target, None)


def stopped(draft, threshold, first):
    """Chains of up to 2 draws, by how many remain when a chain ends at the first unlikely one:
    `first` 0 drops the unlikely draw itself, 1 what follows it."""
    chains = {0: [], 1: [], 2: []}
    for tokens, chance in drawn((-1, 0, 1), draft):
        likely = [draft(tokens[1:n])[tokens[n]] >= threshold for n in (1, 2)]
        chains[min(likely.index(False) + first, 2) if False in likely else 2].append(
            (tokens, chance)
        )
    return {
        (-1, *range(count), *[-1] * (2 - count)): cases for count, cases in chains.items() if cases
    }


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("rule", ENUMERATE)
def test_a_chain_may_end_behind_an_unlikely_draft_but_not_before(rule, first):
    """A draft may depend on earlier draws; dropping it for its own outcome is biased.

    Rules with shared noise are the exception, since no proposal affects their text.
    """
    target, draft = tables(4)
    with enable_x64(True):
        parts = [
            ENUMERATE[rule](p, cases, target, draft)
            for p, cases in stopped(draft, 0.3, first).items()
        ]
    wrong = np.abs(
        sum(joint(part, target, 3) for part in parts) - continuation(target, (), 3)
    ).max()
    assert len(parts) >= 2
    assert wrong > 0.01 if first == 0 and not RULES[rule].shared_noise else wrong < 1e-12


def test_rejection_accepts_as_much_as_possible_on_a_chain():
    """The first draft is accepted with probability 1 - TV(target, draft), the sum of min(p, q)."""
    target, draft = tables(4)
    emitted = check("rejection", (-1, 0), drawn((-1, 0), draft), target, draft)
    accepted = emitted.chance[emitted.num_accepted == 1].sum()
    assert accepted == pytest.approx(np.minimum(target(()), draft(())).sum(), abs=1e-12)


@pytest.mark.parametrize("draft", [Table, SparseTable, GreedyTable, None])
@pytest.mark.parametrize("shape", CHAINS)
def test_block_accepts_no_fewer_than_rejection(shape, draft):
    """On average over a chain; equally many with a single draft, and more where drafts can make
    up for others."""
    vocab, parent = SHAPES[shape]
    target, table = Table(vocab, 1), (draft or Table)(vocab, 2)
    proposals = list(drawn(parent, table) if draft else best(parent, table))
    with enable_x64(True):
        emitted = {
            rule: ENUMERATE[rule](parent, proposals, target, table if draft else None)
            for rule in WALKS
        }
    accepted = {
        rule: (outcome.chance * outcome.num_accepted).sum() for rule, outcome in emitted.items()
    }
    if shape == "chain of 3" and draft in (Table, SparseTable):
        assert accepted["block"] > accepted["rejection"] + 0.01
    else:
        assert accepted["block"] >= accepted["rejection"] - 1e-12
    if shape == "chain of 1":
        assert accepted["block"] == pytest.approx(accepted["rejection"], abs=1e-12)


def test_match_emits_the_draw_of_the_target_whatever_is_proposed():
    """This holds not only in distribution: for each noise and tree, the text is the target's own
    draws."""
    vocab, parent = SHAPES["siblings below"]
    proposals = [((0, *tokens), 1.0) for tokens in itertools.product(range(vocab), repeat=4)]
    wanted = np.array(list(itertools.product(range(vocab), repeat=5)))
    tokens = np.array([tokens for tokens, _ in proposals])
    pick = np.array(list(itertools.product(range(len(tokens)), range(len(wanted)))))
    tokens, wanted = tokens[pick[:, 0]], wanted[pick[:, 1]]
    flat = np.full((len(pick), 5, vocab), 1 / vocab)
    outcome = outcomes(Match(), parent, ForcedTokens(wanted, vocab), pick[:, 0], tokens, flat, None)
    emitted = np.concatenate([outcome.accepted, np.zeros((len(pick), 1), int)], axis=1)
    np.put_along_axis(emitted, outcome.num_accepted[:, None], outcome.next_token[:, None], axis=1)
    for row in range(len(pick)):
        node, text = 0, []
        while True:
            text.append(wanted[row, node])
            node = next(
                (n for n in range(1, 5) if parent[n] == node and tokens[row, n] == text[-1]), None
            )
            if node is None:
                break
        assert emitted[row, : outcome.num_accepted[row] + 1].tolist() == text


def test_chains_only():
    """A rule for chains refuses a proposer of trees by name, before any compilation."""
    with pytest.raises(
        ValueError,
        match="BlockVerification judges chains only, and SampledTree proposes trees: use",
    ):
        toys.decoder("tree", "block")
