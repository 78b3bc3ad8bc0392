"""Rules that change the distribution: which drafts they accept depends on the target alone."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import trees
from enumeration import SHAPES, ForcedTokens, GreedyTable, SparseTable, Table, outcomes, rows_of
from toys import TABLES as toys

from specjax import RULES, Decoder, Match, Threshold, Typical


def possible(parent, tokens, target, rule):
    """[node] -> whether `rule` accepts the text up to it, written draft by draft."""
    chosen = [1.0] + [float(target[max(up, 0)][tokens[n]]) for n, up in list(enumerate(parent))[1:]]

    def likely(n):
        if isinstance(rule, Threshold):
            return chosen[n] >= rule.threshold
        p = target[parent[n]][target[parent[n]] > 0]
        surprise = -(p * np.log(p)).sum()
        return chosen[n] > min(rule.posterior_threshold, rule.posterior_alpha * np.exp(-surprise))

    def keeps(n):
        way = trees.ancestors(parent, n)
        return way[0] == 0 and all(chosen[m] > 0 and likely(m) for m in way[1:])

    if not (isinstance(rule, Threshold) and rule.mean):
        return [keeps(n) for n in range(len(parent))]
    accepted = [n == 0 for n in range(len(parent))]
    for leaf in range(1, len(parent)):
        way = trees.ancestors(parent, leaf)
        values = [chosen[m] for m in way[1:]]
        if (
            leaf not in parent
            and way[0] == 0
            and min(values) > 0
            and np.mean(values) >= rule.threshold
        ):
            accepted[leaf] = True
    return accepted


INEXACT = [
    Threshold(),
    Threshold(0.55),
    Threshold(0.4, mean=True),
    Typical(),
    Typical(0.3, 0.8),
    Typical(0.02, 0.1),
]


def decide(rule, shape, table=Table):
    """Run `rule` on every proposal of a shape: tokens, target [M, N, V], the target's draws, the
    outcome."""
    vocab, parent = SHAPES[shape]
    tokens = np.array(
        [(0, *rest) for rest in itertools.product(range(vocab), repeat=len(parent) - 1)]
    )
    target = rows_of(parent, tokens, table(vocab, 5))
    wanted = np.argmax(
        target * np.random.default_rng(6).random(target.shape), axis=-1
    )  # tokens that are possible under the target
    emitted = outcomes(
        rule, parent, ForcedTokens(wanted, vocab), np.ones(len(tokens)), tokens, target, None
    )
    return tokens, target, wanted, emitted


def test_every_inexact_rule_is_enumerated():
    """Every rule that is not exact has a case too."""
    assert {type(rule) for rule in INEXACT} == {rule for rule in RULES.values() if not rule.exact}


@pytest.mark.parametrize("table", [Table, SparseTable, GreedyTable])
@pytest.mark.parametrize("shape", ["chain of 3", "siblings below", "absent between siblings"])
@pytest.mark.parametrize("rule", INEXACT, ids=repr)
def test_an_inexact_rule_keeps_the_longest_path_that_it_may(rule, shape, table):
    """For every proposal; the next token is the target's own draw."""
    parent = SHAPES[shape][1]
    tokens, target, wanted, emitted = decide(rule, shape, table)
    lengths = set()
    for row in range(len(tokens)):
        keeps = possible(parent, tokens[row], target[row], rule)
        depth = [
            len(trees.ancestors(parent, n)) - 1 if keeps[n] else -1 for n in range(len(parent))
        ]
        node = int(np.argmax(depth))
        way = trees.ancestors(parent, node)
        assert emitted.num_accepted[row] == depth[node]
        assert emitted.accepted[row][: depth[node]].tolist() == tokens[row][way[1:]].tolist()
        assert emitted.next_token[row] == wanted[row, node]
        lengths.add(depth[node])
    assert len(lengths) > 1


@pytest.mark.parametrize("shape", ["chain of 3", "breadth first"])
@pytest.mark.parametrize("mean", [False, True])
def test_threshold_from_all_to_nothing(mean, shape):
    """At 0 it accepts every possible draft; at 1 none, and the text is that of plain decoding."""
    everything, nothing = (decide(Threshold(value, mean), shape)[3] for value in (0, 1))
    assert set(everything.num_accepted) == {everything.accepted.shape[1]}
    wanted = decide(Threshold(1, mean), shape)[2]
    assert set(nothing.num_accepted) == {0}
    np.testing.assert_array_equal(nothing.next_token, wanted[:, 0])


@pytest.mark.parametrize("rule", INEXACT, ids=repr)
def test_at_temperature_0_an_inexact_rule_is_greedy(rule):
    """On one-hot rows it emits what `match` emits, or with `mean` a beginning of it."""
    vocab, parent = SHAPES["siblings below"]
    tokens, target, _, _ = decide(rule, "siblings below", GreedyTable)
    draw = ForcedTokens(target.argmax(-1), vocab)
    greedy, emitted = (
        outcomes(r, parent, draw, np.ones(len(tokens)), tokens, target, None)
        for r in (Match(), rule)
    )
    for row in range(len(tokens)):
        text, wanted = (
            [*o.accepted[row][: o.num_accepted[row]].tolist(), int(o.next_token[row])]
            for o in (emitted, greedy)
        )
        assert (
            text == wanted[: len(text)]
            if (isinstance(rule, Threshold) and rule.mean)
            else text == wanted
        )


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["threshold", "posterior_threshold", "posterior_alpha"])
def test_a_threshold_outside_0_and_1_is_refused(name, value):
    """The error names the threshold and its value before anything is compiled."""
    rule = Threshold if name == "threshold" else Typical
    with pytest.raises(
        ValueError, match=rf"^{name}={value} is not allowed; it must lie in \[0, 1\]$"
    ):
        rule(**{name: value})
    with pytest.raises(
        ValueError, match=rf"^{name}={value} is not allowed; it must lie in \[0, 1\]$"
    ):
        rule(**{name: np.array([0.5, value])})  # one per row
    with pytest.raises(ValueError, match=rf"^{name}=.* is not allowed; it must lie in"):
        rule(**{name: np.float32(value)})
    # An array on a device is checked where a decoder brings it to the host, before any compile.
    decoder = Decoder(
        toys.model(), toys.CASES["none"][0], rule(**{name: jnp.float32(value)}), (), toys.CAPACITY
    )
    with pytest.raises(ValueError, match=rf"^{name}=.* is not allowed; it must lie in"):
        toys.prefill(decoder, toys.params("none"))


@pytest.mark.parametrize(("flat_first", "accepted"), [(True, 1), (False, 0)])
def test_a_draft_is_judged_by_the_entropy_before_it(flat_first, accepted):
    """A token of 0.3 is plausible after a flat distribution, whatever follows it."""
    flat, sure = [0.5, 0.3, 0.2], [0.7, 0.3, 0.0]  # exp(-entropy) is 0.36 and 0.54
    target = np.array([[flat, sure] if flat_first else [sure, flat]])
    draw = ForcedTokens(np.zeros((1, 2), int), 3)
    emitted = outcomes(
        Typical(0.9, 0.8), (-1, 0), draw, np.ones(1), np.array([[0, 1]]), target, None
    )
    assert emitted.num_accepted.tolist() == [accepted]
