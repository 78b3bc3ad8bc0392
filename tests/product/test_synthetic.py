"""Synthetic acceptance: as many drafts are accepted as asked, and nothing calls that lossless."""

import dataclasses

import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trees

import specjax
from specjax import NGram, SyntheticAcceptance
from specjax.sampling import IndependentDraw, make_key
from specjax.serve import Engine
from specjax.tree import Tree
from specjax.types import Proposal

pytestmark = pytest.mark.xdist_group("synthetic")  # a share takes all of them, or none

ROWS = 4096


@pytest.fixture(scope="module")
def target():
    return specjax.load(folders.target())


@pytest.fixture(scope="module")
def draft():
    return specjax.load(folders.draft())


def judged(rule, parent, rows=ROWS):
    """The nodes that a rule accepts, and the next tokens, over many keys."""
    nodes = len(parent)
    logits = jnp.zeros((nodes, 7)).at[:, 3].set(50.0)
    proposal = Proposal(jnp.arange(nodes, dtype=jnp.int32) % 7, jnp.array(parent, jnp.int32))
    tree = Tree.of(proposal.parent, nodes - 1, False)
    keys = jax.random.split(make_key(3), rows)
    verdict = jax.vmap(lambda key: rule(IndependentDraw(key, 7, nodes), proposal, tree, logits))(
        keys
    )
    return np.asarray(verdict.node), np.asarray(verdict.next_token)


CHAIN = [-1, 0, 1, 2, 3]


def test_a_length_has_the_mean_and_the_least_variance():
    """Two drafts always and a third in 0.3 of the passes: no other integers have this mean and a
    smaller variance."""
    node, token = judged(SyntheticAcceptance(length=3.3), CHAIN)
    assert set(node) == {2, 3}
    assert abs(node.mean() - 2.3) < 3 * np.sqrt(0.3 * 0.7 / ROWS)
    assert set(token) == {3}
    for length, wanted in ((1, 0), (3, 2), (5, 4)):
        assert set(judged(SyntheticAcceptance(length=length), CHAIN, 64)[0]) == {wanted}


def test_a_rate_is_that_of_each_draft():
    """P(n drafts) = r^n (1 - r), and r^4 for the whole chain; 0 and 1 are none and all."""
    node = judged(SyntheticAcceptance(rate=0.6), CHAIN)[0]
    wanted = np.array([0.6**n * (0.4 if n < 4 else 1) for n in range(5)])
    found = np.bincount(node, minlength=5) / ROWS
    assert np.all(np.abs(found - wanted) < 4 * np.sqrt(wanted * (1 - wanted) / ROWS))
    for rate, last in ((0, 0), (1, 4)):
        assert set(judged(SyntheticAcceptance(rate=rate), CHAIN, 64)[0]) == {last}


def test_in_a_tree_first_children_are_judged():
    """With absent nodes too: every accepted node is a first child, as deep as asked."""
    parent = [-1, 0, 0, -1, 2, 1, 1, 5]
    firsts = [0, 1, 5, 7]
    assert set(judged(SyntheticAcceptance(rate=0.5), parent)[0]) == set(firsts)
    for length in (1, 2, 3, 4):
        node = judged(SyntheticAcceptance(length=length), parent, 16)[0]
        assert set(node) == {firsts[length - 1]}
        assert len(trees.ancestors(parent, int(node[0]))) == length


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_call_has_the_length_and_says_that_it_is_lossy(target, draft, temperature):
    """AL = 1 + accepted / passes; accepted positions keep the draft's tokens; nothing is exact."""
    asked = SyntheticAcceptance(length=2.5)
    out = specjax.generate(
        target, "the cat", draft=draft, num_drafts=4, synthetic_acceptance=asked,
        max_new_tokens=240, temperature=temperature, eos=[],
    )  # fmt: skip
    assert not out.exact and "this rule changes the distribution" in str(out)
    length = 1 + out.stats.accepted / out.stats.target_passes
    assert abs(length - 2.5) < 0.2
    none, all_ = (
        specjax.generate(
            target, "the cat", draft=draft, num_drafts=4, synthetic_acceptance=rate,
            max_new_tokens=41, temperature=temperature, eos=[],
        )
        for rate in (0.0, 1.0)
    )  # fmt: skip
    assert (none.stats.accepted, none.stats.target_passes) == (0, 41)
    assert all_.stats.target_passes == 9
    if temperature == 0:
        plain = specjax.generate(target, "the cat", proposer="none", max_new_tokens=41, eos=[],
                                 temperature=0)  # fmt: skip
        assert none.tokens == plain.tokens


REFUSED = {
    "rule": ({"rule": "rejection"}, "rule='rejection' cannot hold then"),
    "constraint": ({"constraint": specjax.Regex("a+")}, "constraint=.* cannot hold then"),
    "no drafts": ({"num_drafts": 0}, "nothing drafts here"),
    "rate": ({"synthetic_acceptance": 1.5}, "synthetic_acceptance=1.5; it must"),
    "too long": (
        {"synthetic_acceptance": SyntheticAcceptance(length=4.5), "num_drafts": 3},
        "length=4.5 is more than the 4 tokens",
    ),
    "auto": ({"proposer": "auto"}, "auto.* cannot be used"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(target, draft, case):
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        specjax.generate(target, "x", **{"draft": draft, "synthetic_acceptance": 0.5, **options})


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({}, "pass one of them"),
        ({"rate": 0.5, "length": 2}, "pass one of them"),
        ({"rate": -0.1}, r"rate=-0.1 is not allowed"),
        ({"length": 0.5}, "length=0.5 is not allowed; it is the mean number of tokens"),
        ({"length": float("nan")}, "length=nan is not allowed"),
        ({"length": "2"}, "length='2' is not allowed"),
    ],
)
def test_numbers_are_checked_at_the_door(numbers, message):
    with pytest.raises(ValueError, match=message):
        SyntheticAcceptance(**numbers)


def test_an_audit_refuses_it(target):
    rule = SyntheticAcceptance(rate=0.5)
    decoder = specjax.Decoder(target.model, NGram(2), rule, target.eos, 32)
    with pytest.raises(ValueError, match="an audit of it says nothing: pass the rule"):
        specjax.audit(decoder, specjax.Params(target.params), [[5, 6]])


def test_an_engine_has_the_length_and_marks_its_texts(target, draft):
    """Every request; what a synthetic text cannot be is refused by name."""
    drafter = specjax.make_drafter(target, draft, num_drafts=3)
    options = {"slots": 2, "capacity": 128, "chunk": 16}
    asked = SyntheticAcceptance(length=3.0)
    with Engine(target, {"draft": drafter}, synthetic_acceptance=asked, **options) as engine:
        request = specjax.Request(prompts="the cat", max_new_tokens=61, eos=[], seed=1)
        served = [engine.submit(request, index) for index in range(2)]
        for handle in served:
            out = handle.result(60)
            assert (len(out.tokens), len(out.steps)) == (61, 21)
        assert engine.model_hash.startswith("synthetic-")
        with pytest.raises(ValueError, match=r"synthetic_acceptance=.*leave it out"):
            engine.submit(request, resume=[1])
        with pytest.raises(ValueError, match="synthetic_acceptance= is not used by an engine"):
            engine.submit(dataclasses.replace(request, synthetic_acceptance=0.5))
    for field, value in (("expected", 4), ("constraint_size", (16, 16))):
        with pytest.raises(ValueError, match=f"{field}=.* cannot hold then: pass {field}=None"):
            Engine(
                target, {"draft": drafter}, synthetic_acceptance=asked, **options, **{field: value}
            )
    with pytest.raises(ValueError, match="nothing drafts here"):
        Engine(target, synthetic_acceptance=asked, **options)
