"""`generate` with its default, `Adaptive`: what is measured, what is learned, what is refused."""

import dataclasses

import counted
import language_models
import numpy as np
import pytest
from adaptive_cases import LOOKUP, PROPOSER
from preparing import prepared
from toys import TABLES as toys

import specjax
from specjax import NGram
from specjax.generation.warmup import place, warm_up
from specjax.proposers import PAUSE, Adaptive, Calibrated, Chain
from specjax.tuning import Learned


@pytest.fixture(scope="module")
def target():
    return language_models.target()


@pytest.fixture(scope="module")
def draft():
    return language_models.draft()


PROMPTS, NEW, FEW = ["the cat the cat", "a dog"], 24, {"num_drafts": 2}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_default_measures_once_and_keeps_the_text(target, draft, temperature, stream):
    """The first call measures every option; a second one compiles and measures nothing."""
    how = {"temperature": temperature, "max_new_tokens": NEW, "seed": 3}
    plain = specjax.generate(target, PROMPTS, proposer="none", **how)
    assert plain.choices is None
    call = prepared(target, PROMPTS, draft=draft, **how)
    assert isinstance(call.decoder.proposer, Adaptive) and call.learns
    assert call.decoder.proposer.max_depth == 8 and call.decoder.proposer.drafter is not None
    # Few drafts, whose programs are small.
    for more in (FEW, {"proposer": "auto", "draft": draft, **FEW}):
        first = specjax.generate(target, PROMPTS, **how, **more)
        before = counted.compilations()
        if stream:
            pieces = specjax.generate(target, PROMPTS, stream=True, **how, **more)
            joined = ["".join(parts) for parts in zip(*pieces, strict=True)]
            again = pieces.output
            assert joined == again.text
        else:
            again = specjax.generate(target, PROMPTS, **how, **more)
            assert again.stats.compile_seconds == 0
        assert counted.compilations() == before
        assert first.tokens == again.tokens == plain.tokens
        names, seconds = first.choices.options, first.choices.seconds
        assert names[0] == ("plain", 0) and len(seconds) == len(names)
        assert {name for name, _ in names[1:]} == {
            "lookup",
            *(["drafter"] if "draft" in more else []),
        }
        assert max(depth for _, depth in names) == FEW["num_drafts"]
        assert np.isfinite(seconds).all() and (seconds >= seconds[0]).all() and seconds[0] > 0
        assert "steps chosen from plain" in str(first) and "lookup of 2: " in str(first)


def test_acceptance_is_learned_from_text_to_text(target):
    """The rates of all rows move the prior of their part; a call starts with the learned figures,
    and the parameters get them without another program."""
    learned = Learned(np.ones(2), np.array([0.5, 0.4]), 0.0)
    learned.learn_rate(0, 20.0, 10.0)
    np.testing.assert_allclose(learned.prior, [(10 + 40 * 0.5) / 60, 0.4])
    call = prepared(target, PROMPTS, max_new_tokens=NEW, **FEW)
    assert len(call.decoder.proposer.options) == 2
    ready = place(call)
    other = dataclasses.replace(ready, params=learned.put(ready.params))
    put = other.params.proposer
    np.testing.assert_allclose(put.prior, learned.prior)
    np.testing.assert_allclose(put.seconds, 1)
    state = call.decoder.run(ready.params, ready.prefill())
    before = counted.compilations()
    again = call.decoder.run(other.params, other.prefill())
    assert counted.compilations() == before
    assert toys.texts(state) == toys.texts(again)
    learned.learn(again)
    assert learned.prior.shape == (2,) and learned.prior[1] == 0.4


def test_what_did_not_pay_in_earlier_texts_is_tried_late(target):
    """After 40 judged drafts a part is known, and a text begins with a long pause of it."""
    learned = Learned(np.ones(4), np.array([0.5, 0.4]), 0.0)
    assert learned.pause.tolist() == [PAUSE, PAUSE]
    learned.learn_rate(1, 25.0, 1.0)
    assert learned.pause.tolist() == [PAUSE, PAUSE]
    learned.learn_rate(1, 25.0, 1.0)
    assert learned.pause.tolist() == [PAUSE, 64]
    call = prepared(target, PROMPTS, max_new_tokens=NEW)
    assert learned.put(place(call).params).proposer.pause.tolist() == [PAUSE, 64]


def test_a_call_begins_with_what_earlier_calls_learned(target, draft):
    """That includes the pause before the first drafts of a part that did not pay."""
    # "auto" is the default; two drafts, as above, whose programs are compiled.
    how = {"draft": draft, "proposer": "auto", "num_drafts": 2, "max_new_tokens": NEW}
    first = specjax.generate(target, PROMPTS, **how)
    learned = warm_up(prepared(target, PROMPTS, **how)).learned
    learned.seconds[:] = [1, *[3] * (len(learned.seconds) - 1)]
    learned.awake = 0.0  # it does not rest
    for number, drafts in ((0, True), (100, False)):
        learned.prior[:], learned.judged[:] = 0.01, number
        out = specjax.generate(target, PROMPTS, **how)
        assert out.tokens == first.tokens
        assert (out.stats.tested > 0) == drafts


def test_a_drafter_takes_the_place_of_the_draft(target, draft):
    """With "auto", chains of a passed drafter are a part of the choice; the text is the same."""
    heads = dataclasses.replace(language_models.heads(target), choices=())
    how = {"max_new_tokens": NEW, "temperature": 0.8, "seed": 5}
    plain = specjax.generate(target, PROMPTS, proposer="none", **how)
    made = specjax.generate(target, PROMPTS, drafter=heads, proposer="auto", **how)
    assert made.tokens == plain.tokens
    assert {name for name, _ in made.choices.options} == {"plain", "lookup", "drafter"}
    chain = specjax.make_drafter(target, draft, num_drafts=5)
    for num_drafts in (None, 3):
        call = prepared(
            target, PROMPTS, drafter=chain, proposer="auto", num_drafts=num_drafts, **how
        )
        assert isinstance(call.decoder.proposer, Adaptive) and call.learns
        assert call.decoder.proposer.drafter is chain.proposer
        assert call.num_drafts is None if num_drafts is None else set(call.num_drafts) == {3}
    assert (
        prepared(
            target, PROMPTS, drafter=chain, proposer="auto", num_drafts=0, **how
        ).decoder.proposer
        == specjax.NoProposer()
    )
    with pytest.raises(ValueError, match=r"with the rule Rejection"):
        prepared(target, PROMPTS, drafter=chain, proposer="auto", rule="rejection")
    with pytest.raises(ValueError, match=r"leave draft and proposer= out"):
        prepared(target, PROMPTS, drafter=chain, draft=draft, proposer="auto")


def test_where_a_text_would_depend_on_times_the_default_does_not_choose(target, draft):
    """Another rule, or a cache of one width, has the draft or plain decoding instead."""
    for rule in ("rejection", "block", "typical", "threshold"):
        alone, pair = (
            prepared(target, PROMPTS, rule=rule, **more).decoder.proposer
            for more in ({}, {"draft": draft})
        )
        assert isinstance(alone, specjax.NoProposer)
        assert isinstance(pair, Chain) and pair.max_depth == 4
        with pytest.raises(ValueError, match=r'proposer="auto" cannot be used with the rule'):
            prepared(target, PROMPTS, rule=rule, proposer="auto")
    with pytest.raises(ValueError, match='pass "int8" together with draft='):
        prepared(target, PROMPTS, proposer="auto", draft_dtype="int8")


def test_fixed_times_measure_nothing(target, draft):
    """`adaptive` with seconds is used as it is."""
    made = specjax.make_drafter(target, draft, num_drafts=2)
    fixed = specjax.adaptive(made, seconds=[1.0, 1.1, 1.3])
    assert fixed.proposer.options[-1] == ("drafter", 2)
    out = specjax.generate(target, PROMPTS, drafter=fixed, max_new_tokens=NEW)
    assert out.choices is None
    plain = specjax.generate(target, PROMPTS, proposer="none", max_new_tokens=NEW)
    assert out.tokens == plain.tokens


def test_a_tree_is_adapted_where_it_is_asked_for(target, draft):
    """Its best nodes are read where they pay, and the text is that of plain decoding.

    Without a plan `auto` takes chains of the same drafter, whose steps cost less.
    """
    shape = {"depth": 2, "width": 2, "num_nodes": 5}
    tree = specjax.make_drafter(target, draft, specjax.DynamicTree, **shape)
    unasked = prepared(target, PROMPTS, drafter=tree, proposer="auto", max_new_tokens=NEW)
    assert isinstance(unasked.decoder.proposer, Adaptive) and unasked.decoder.proposer.is_chain
    trees = specjax.adaptive(tree)
    proposer = trees.proposer
    assert isinstance(proposer, Adaptive) and proposer.drafter == Calibrated(tree.proposer)
    assert proposer.widths == (1, 3, 5) and not proposer.is_chain
    how = {"temperature": 0.9, "max_new_tokens": NEW, "seed": 1}
    out = specjax.generate(target, PROMPTS, drafter=trees, **how)
    assert out.tokens == specjax.generate(target, PROMPTS, proposer="none", **how).tokens


def test_what_cannot_be_is_refused(target, draft):
    tree = specjax.make_drafter(target, draft, specjax.StaticTree, branching=(2, 1))
    chain = specjax.make_drafter(target, draft, num_drafts=4)
    for arguments, words in (
        ((tree,), "drafts fixed trees"),
        ((chain, NGram(3)), r"draft \[3, 4\] tokens deep"),
        (("ngram",), "drafter='ngram', of the type str; pass the drafter"),
    ):
        with pytest.raises(ValueError, match=words):
            specjax.adaptive(*arguments)
    for seconds in ([1.0], [1, 1, 1, 1, 0.0], [1, 1, 1, 1, float("nan")]):
        with pytest.raises(ValueError, match=r"seconds=.*a time above 0 for each of the options"):
            specjax.adaptive(chain, seconds=seconds)
    for widths in ((2, 4), (1, 2), (4, 1), (1, 2, 5)):
        with pytest.raises(ValueError, match=r"widths=.*ascending numbers of tokens from 1 to 4"):
            Adaptive(LOOKUP, None, widths)
    with pytest.raises(ValueError, match="costs of its own"):
        PROPOSER.bind(target, None)
