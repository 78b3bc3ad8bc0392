"""`Adaptive` over a tree: what its best nodes gave, and which number of them a step takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from table_sources import TableSource
from toys import TABLES as toys
from toys import adaptive

from specjax import RULES, Decoder, DynamicTree, NGram, Params
from specjax.drafters import tree_widths, widths_of
from specjax.proposers import Adaptive, Calibrated
from specjax.proposers.adaptive.tree_gains import ChainGains, LastTree, TreeGains

pytestmark = pytest.mark.xdist_group("tree gains")  # a share takes all of them, or none

WIDTHS, CHAINS, DEPTH = (1, 2, 4, 7), (1, 2, 4), 3


def naive(tokens, parent, place, text, pending):
    """The accepted drafts of a row with each width, by a walk down the kept nodes."""
    wanted, found = [*text[1:], pending], []
    for width in WIDTHS:
        node = depth = 0
        while depth < len(wanted):
            below = [
                n
                for n in range(1, len(tokens))
                if parent[n] == node and place[n] < width and tokens[n] == wanted[depth]
            ]
            if not below:
                break
            node, depth = below[0], depth + 1
        found.append(depth)
    return found


def test_what_each_number_of_nodes_would_have_given():
    """Random trees and texts, beside a walk; of a tree that was not drafted nothing is known."""
    rng, rows = np.random.default_rng(0), 60
    parent = np.array([[-1, *(rng.integers(0, n) for n in range(1, 7))] for _ in range(rows)])
    parent = parent.astype(np.int32)
    tokens = rng.integers(0, 3, (rows, 7)).astype(np.int32)
    for row in range(rows):  # siblings are distinct
        for n in range(1, 7):
            tokens[row, n] = sum(parent[row, m] == parent[row, n] for m in range(1, n))
    chance = np.ones((rows, 7))
    for n in range(1, 7):  # parents come first
        chance[:, n] = chance[np.arange(rows), parent[:, n]] * rng.random(rows)
    place = np.argsort(np.argsort(-chance, axis=1), axis=1)
    text = rng.integers(0, 2, (rows, DEPTH + 1)).astype(np.int32)
    text[:, 0] = tokens[:, 0]
    count, pending = rng.integers(0, DEPTH + 1, rows), rng.integers(0, 2, rows)
    depth = rng.integers(0, DEPTH + 1, rows)
    chain = rng.random(rows) < 0.2
    last = LastTree(*map(jnp.asarray, (tokens, parent, place, depth, text, count, chain)))
    right = last.right(jnp.asarray(pending, jnp.int32))
    accepted, known = last.outcome(WIDTHS, *right)
    straight, reached, made = last.chain_outcome(CHAINS, *right)
    for row in range(rows):
        levels = [min(width - 1, DEPTH) for width in WIDTHS]
        learns = count[row] > 0 and depth[row] > 0
        sure = [learns and not chain[row] and depth[row] >= level for level in levels]
        assert known[row].tolist() == sure
        if count[row]:
            walked = naive(
                tokens[row], parent[row], place[row], text[row, : count[row]], pending[row]
            )
            assert accepted[row].tolist() == walked
            # First children, down from the root.
            path, wanted = [0], [*text[row, 1 : count[row]], pending[row]]
            while below := [n for n in range(1, 7) if parent[row, n] == path[-1]]:
                path.append(below[0])
            drafts = tokens[row, path[1:]].tolist()
            taken = sum(
                drafts[: n + 1] == wanted[: n + 1] for n in range(min(map(len, (drafts, wanted))))
            )
            # The accepted drafts up to each width are those of its segment and of the ones before.
            upto = np.cumsum(straight[row]).tolist()
            assert upto == [min(taken, width - 1) for width in CHAINS]
            drafted = [bool(learns and depth[row] >= width - 1) for width in CHAINS]
            assert made[row].tolist() == drafted
            before = [0, *(width - 1 for width in CHAINS[:-1])]
            assert reached[row].tolist() == [
                each and taken >= level for each, level in zip(drafted, before, strict=True)
            ]


def test_a_known_number_of_nodes_tells_of_a_wider_one():
    """Means win over guesses, and more nodes never promise less."""
    start = TreeGains.start(1, WIDTHS)
    before = start.tokens(WIDTHS, DEPTH, jnp.float32(0.4))[0]
    np.testing.assert_allclose(before[:2], [1.0, 1.75], atol=0.01)
    assert (np.diff(before) > 0).all()
    known = start
    for _ in range(200):
        known = known.after(jnp.array([[0.0, 0.9, 0, 0]]), jnp.array([[True, True, False, False]]))
    after = known.tokens(WIDTHS, DEPTH, jnp.float32(0.4))[0]
    assert after[1] == pytest.approx(1.9, abs=0.05)
    assert after[2] > before[2]  # a chain of three at a rate of 0.9 gives 2.4 drafts
    for _ in range(200):
        known = known.after(jnp.array([[0, 0.9, 1.0, 1.1]]), jnp.ones((1, 4), bool))
    np.testing.assert_allclose(
        known.tokens(WIDTHS, DEPTH, jnp.float32(0.4))[0], [1, 1.9, 2, 2.1], atol=0.1
    )


@pytest.mark.parametrize(
    ("sign", "seconds", "least", "most"),
    [
        (
            1.0,
            (1.0, 1.02, 1.04, 1.06, 1.02, 1.04),
            1.3,
            9.0,
        ),  # drafts cost little, and some are right
        (-1.0, (1.0, 1.5, 2.0, 3.0, 1.5, 2.0), 1.0, 1.4),  # they are wrong, and dear
    ],
)
def test_a_tree_is_drafted_where_it_pays(sign, seconds, least, most):
    """By costs that are data, in one program; the text is that of plain decoding."""
    proposer = Adaptive(None, Calibrated(DynamicTree(TableSource(toys.VOCAB), 3, 2, 7)), WIDTHS)
    dec = Decoder(toys.model(), proposer, RULES["match"](), (toys.EOS,), toys.CAPACITY)
    table = sign * toys.CASES["table dynamic tree"][1]
    params = Params(toys.weights(), adaptive(seconds, table))
    state = jax.device_get(dec.run(params, toys.prefill(dec, params)).replace(key=None))
    tokens = state.stats.emitted.sum() / state.stats.target_passes.sum()
    assert least <= tokens <= most
    assert (state.stats.drafting < state.stats.target_passes).any() or sign > 0
    assert toys.texts(state) == toys.decoded("none", "match")[0]


def test_a_wide_tree_that_was_unlucky_is_tried_again():
    """While narrow ones are drafted, what is known of it fades to what they promise of it."""
    narrow, none = jnp.array([[True, True, False, False]]), jnp.zeros((1, 4), bool)
    known = TreeGains.start(1, WIDTHS)
    for _ in range(5):
        known = known.after(jnp.zeros((1, 4)), jnp.ones((1, 4), bool))
    unlucky = float(known.tokens(WIDTHS, DEPTH, jnp.float32(0.4))[0, 3])
    for _ in range(20):
        known = known.after(jnp.array([[0, 0.9, 0, 0]]), none)
    # Nothing fades in steps that teach nothing.
    assert known.tokens(WIDTHS, DEPTH, jnp.float32(0.4))[0, 3] == unlucky
    for _ in range(240):
        known = known.after(jnp.array([[0, 0.9, 0, 0]]), narrow)
    fresh = TreeGains.start(1, WIDTHS)
    fresh = TreeGains(fresh.drafts.at[:, 1].set(known.drafts[:, 1]), fresh.seen.at[:, 1].set(128))
    found, wanted = (
        np.asarray(each.tokens(WIDTHS, DEPTH, jnp.float32(0.4))[0]) for each in (known, fresh)
    )
    assert unlucky < found[1] and found[3] == pytest.approx(wanted[3], abs=0.2)


def test_short_chains_tell_of_long_ones():
    """The expected drafts are those of the rates of all depths, which are counted where reached."""
    rng, rates = np.random.default_rng(0), np.array([0.9, 0.6, 0.8])
    known = ChainGains.start(1, CHAINS)
    for step in range(600):
        depth = 3 if step < 300 else 1
        taken = int((rng.random(3) < rates).cumprod()[:depth].sum())
        accepted = jnp.array([[0, min(taken, 1), max(taken - 1, 0)]], jnp.float32)
        made = jnp.array([[True, True, depth == 3]])
        known = known.learned(accepted, made & jnp.array([[True, True, taken > 0]]), made)
    found = known.tokens(CHAINS, jnp.float32(0.4))[0]
    assert found[1] == pytest.approx(1.9, abs=0.05)
    assert known.rate(CHAINS, jnp.float32(0.4))[1] > 100
    # The second segment was not drafted lately, so its estimate is a guess from the first.
    guess = 1.9 + 0.9 * sum((0.9 + 0.05) ** n for n in (1, 2))
    assert found[2] == pytest.approx(guess, abs=0.15)
    deep = known.learned(*(jnp.array([[0, 1, 1.08]]), *[jnp.ones((1, 3), bool)] * 2))
    for _ in range(300):
        deep = deep.learned(jnp.array([[0, 0.9, 1.08]]), *[jnp.ones((1, 3), bool)] * 2)
    wanted = 1 + 0.9 + 0.9 * (0.6 + 0.6 * 0.8)
    assert deep.tokens(CHAINS, jnp.float32(0.4))[0, 2] == pytest.approx(wanted, abs=0.03)


def test_a_chain_tells_of_trees():
    """While chains are drafted, what is known of trees fades to what the chain's rate promises."""
    every = jnp.ones((1, 4), bool)
    known = TreeGains.start(1, WIDTHS)
    for _ in range(5):
        known = known.after(jnp.zeros((1, 4)), every)
    rate, shown = jnp.array([0.9]), jnp.array([100.0])
    unlucky = known.tokens(WIDTHS, DEPTH, rate, shown)[0, 3]
    for _ in range(500):
        known = known.after(jnp.zeros((1, 4)), ~every, jnp.array([True]))
    assert unlucky < 2.5 and known.tokens(WIDTHS, DEPTH, rate, shown)[0, 3] > 3.4


def test_what_a_tree_adds_to_a_chain():
    """It is known beside any estimate of chains, and of as many nodes it is first guessed small."""
    every, rate, shown = jnp.ones((1, 4), bool), jnp.array([0.5]), jnp.array([100.0])
    known = TreeGains.start(1, WIDTHS)
    for _ in range(200):
        known = known.after(jnp.array([[0.0, 0.1, -0.2, 0.4]]), every)
    for chains in ([0.0, 0.4, 0.8], [0.0, 0.8, 1.8]):
        found = known.tokens(WIDTHS, DEPTH, rate, shown, [jnp.array([each]) for each in chains])[0]
        wanted = [1.1 + chains[1], 0.8 + chains[2], 1.4 + chains[2]]
        np.testing.assert_allclose(found[1:], np.maximum.accumulate(wanted), atol=0.12)
    # Four steps in which trees gave less than the chain lower the estimate of a wide tree by more
    # than that of a tree of as many nodes as a chain has.
    unlucky = TreeGains.start(1, WIDTHS)
    for _ in range(4):
        unlucky = unlucky.after(jnp.array([[0.0, -0.1, -0.1, -0.1]]), every)
    chains = [jnp.array([each]) for each in (0.0, 0.5, 0.875)]
    found = unlucky.tokens(WIDTHS, DEPTH, rate, shown, chains)[0]
    assert found[1] > 1.5 and found[2] > 1.875
    assert unlucky.tokens(WIDTHS, DEPTH, rate, shown, [chains[0]] * 3)[0, 3] < found[3]


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_trees_learn_what_they_add_to_chains(rule):
    """In a program that drafts trees and chains, by the outcomes of its steps.

    Under `rejection` a draft that was not read might have been accepted, whatever the text is.
    """
    proposer = Adaptive(None, Calibrated(DynamicTree(TableSource(toys.VOCAB), 3, 2, 7)), WIDTHS)
    dec = Decoder(toys.model(), proposer, RULES[rule](), (toys.EOS,), toys.CAPACITY)
    seconds = (1.0, 9.0, 9.0, 1.0, 9.0, 1.02)
    params = Params(toys.weights(), adaptive(seconds, toys.CASES["table dynamic tree"][1]))
    state = toys.prefill(dec, params)
    wanted, last, differs = TreeGains.start(len(state.tokens), WIDTHS), None, False
    while not np.asarray(state.done).all():
        pending = np.asarray(jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1))
        state = dec.run(params, state, 1)
        if last is not None:
            right = last.right(jnp.asarray(pending[:, 0]))
            accepted, known = last.outcome(WIDTHS, *right)
            taken = last.chain_outcome(CHAINS, *right)[0].sum(1, keepdims=True)
            added = accepted
            if rule == "match":
                added -= np.minimum(taken, [0, 1, 3, 3])
            differs |= bool((np.where(known, added, 0) > 0).any())
            wanted = wanted.after(added, known, last.chain & last.teaches)
        last = jax.tree.map(jnp.asarray, jax.device_get(state.proposer.last))
    assert differs
    np.testing.assert_allclose(state.proposer.trees.drafts, wanted.drafts, atol=1e-5)
    np.testing.assert_allclose(state.proposer.trees.seen, wanted.seen, rtol=1e-5)


def test_a_lookup_has_no_options_for_more_nodes_than_it_drafts():
    """Their seconds would be those of a smaller one: they are neither measured nor chosen."""
    tree = Calibrated(DynamicTree(TableSource(toys.VOCAB), 3, 2, 7))
    proposer = Adaptive(NGram(3, min_ngram=1), tree, WIDTHS)
    assert proposer.options == (
        ("plain", 0), ("lookup", 1), ("lookup", 3), ("drafter", 1), ("drafter", 3), ("drafter", 6),
        ("chain", 1), ("chain", 3),
    )  # fmt: skip
    dec = Decoder(toys.model(), proposer, RULES["match"](), (toys.EOS,), toys.CAPACITY)
    table = toys.CASES["table dynamic tree"][1]
    drafted = set()
    for seconds in ((1, 1, 1, *[9] * 5), (1, 9, 9, 9, 9, 1, 9, 9), (1,) * 8):
        params = Params(toys.weights(), adaptive(tuple(map(float, seconds)), table))
        state = toys.prefill(dec, params)
        while not np.asarray(state.done).all():
            state = dec.run(params, state, 1)
            now = np.asarray(state.proposer.drafted), np.asarray(state.proposer.offered)
            drafted |= {(seconds[1:4:2], bool(who), int(n)) for who, n in zip(*now, strict=True)}
        assert toys.texts(state) == toys.decoded("none", "match")[0]
    assert {n for dear, who, n in drafted if not who and dear == (1, 9)} >= {3}
    assert {n for dear, who, n in drafted if who and dear == (9, 9)} >= {6}


def test_chains_are_options_beside_trees():
    """By costs that are data; the text is that of plain decoding, and a chain of first children."""
    proposer = Adaptive(None, Calibrated(DynamicTree(TableSource(toys.VOCAB), 3, 2, 7)), WIDTHS)
    dec = Decoder(toys.model(), proposer, RULES["match"](), (toys.EOS,), toys.CAPACITY)
    table, made = toys.CASES["table dynamic tree"][1], {}
    for name, seconds in (("chain", (1, 9, 9, 9, 9, 1)), ("drafter", (1, 9, 9, 1, 9, 9))):
        params = Params(toys.weights(), adaptive(tuple(map(float, seconds)), table))
        state, taken = toys.prefill(dec, params), []
        while not np.asarray(state.done).all():
            state = dec.run(params, state, 1)
            last = jax.device_get(state.proposer.last)
            if np.asarray(state.proposer.offered).max() > 0:
                taken.append(bool(last.chain.any()))
        made[name] = taken
        assert toys.texts(state) == toys.decoded("none", "match")[0]
        # What was learned goes to the next text.
        trees, chains = (each.known() for each in (state.proposer.trees, state.proposer.chains))
        assert trees.shape == (4, 2) and chains.shape == (3, 2) and chains[2, 1] > 1
        begun = ChainGains.start(2, CHAINS, jnp.asarray(chains))
        np.testing.assert_allclose(begun.drafts, np.stack([chains[:, 0]] * 2))
        np.testing.assert_allclose(begun.seen[0], chains[:, 1])
        if name == "drafter":
            assert trees[3, 1] > 1
    assert made["chain"] and all(made["chain"]) and made["drafter"] and not any(made["drafter"])


@pytest.mark.parametrize(
    ("depth", "nodes", "widths", "compiled"),
    [
        (8, 60, (1, 3, 5, 9, 17, 33, 60), (1, 3, 5, 9, 17, 33, 60)),  # it is on the ladder
        (5, 13, (1, 3, 5, 6, 9, 13), (1, 3, 6, 9, 13)),
        (7, 17, (1, 3, 5, 8, 9, 17), (1, 3, 5, 9, 17)),
        (6, 32, (1, 3, 5, 7, 9, 17, 32), (1, 3, 5, 9, 17, 32)),
        (3, 4, (1, 3, 4), (1, 3, 4)),
        (1, 7, (1, 2, 3, 5, 7), (1, 3, 5, 7)),
    ],
)
def test_a_whole_chain_is_a_width_without_one_more_pass(depth, nodes, widths, compiled):
    """There are as many passes as the ladder has, and each width has one that reads it."""
    assert tree_widths(depth, nodes) == (widths, compiled)
    assert len(compiled) == len(widths_of(nodes - 1)) and set(compiled) <= set(widths)


def test_drafts_of_a_width_without_a_pass_are_read_in_a_wider_one():
    """A chain of three in the pass of a tree of seven; the text is that of plain decoding."""
    tree = Calibrated(DynamicTree(TableSource(toys.VOCAB), 3, 2, 7))
    proposer = Adaptive(None, tree, WIDTHS, compiled=(1, 2, 7))
    assert proposer.narrower == (1, 2)
    assert proposer.options == Adaptive(None, tree, WIDTHS).options
    dec = Decoder(toys.model(), proposer, RULES["match"](), (toys.EOS,), toys.CAPACITY)
    seconds = (1.0, 9.0, 9.0, 9.0, 9.0, 1.0)
    params = Params(toys.weights(), adaptive(seconds, toys.CASES["table dynamic tree"][1]))
    state, drafted = toys.prefill(dec, params), set()
    while not np.asarray(state.done).all():
        state = dec.run(params, state, 1)
        drafted |= {*np.asarray(state.proposer.offered).tolist()}
    assert toys.texts(state) == toys.decoded("none", "match")[0]
    assert max(drafted) == 3
