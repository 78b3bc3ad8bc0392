"""Costs by context: a text that grows inside a call is drafted by the costs of its length."""

import dataclasses

import counted
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adaptive_cases import LOOKUP, WIDTHS, arrays
from toys import TABLES as toys

import specjax
from specjax import RULES, Decoder
from specjax.drafters import BoundDrafter
from specjax.models import LanguageModel
from specjax.proposers import Adaptive
from specjax.serve import Engine
from specjax.tuning import Learned, calibrate

pytestmark = pytest.mark.xdist_group("contexts")  # a share takes all of them, or none

MOST = 20
"""The longest text in which drafts pay: they cost nothing there, and nine passes above."""
CHEAP, DEAR = (1.0, 1.0, 1.0, 1.0, 1.0), (1.0, 9.0, 9.0, 9.0, 9.0)
PROPOSER = Adaptive(LOOKUP, toys.CASES["draft 3"][0], WIDTHS)


def with_contexts(contexts, *rows):
    params = arrays()
    own = dataclasses.replace(
        params.proposer,
        seconds=jnp.array(rows, jnp.float32),
        contexts=jnp.array(contexts, jnp.int32),
    )
    return dataclasses.replace(params, proposer=own)


def decoder(rule):
    return Decoder(toys.model(), PROPOSER, RULES[rule](), (toys.EOS,), toys.CAPACITY)


def stepped(dec, params, **settings):
    """The lengths [S, B] before each step, the drafts [S, B] that it made, and the last state."""
    state, lengths, offered = toys.prefill(dec, params, **settings), [], []
    while not np.asarray(state.done).all():
        lengths.append(np.where(state.done, 0, state.length))
        state = dec.run(params, state, 1)
        offered.append(np.asarray(state.proposer.offered))
    return np.array(lengths), np.array(offered), state


def late_drafts(lengths, offered, together):
    """The drafts that were made of texts longer than `MOST`, and of shorter ones."""
    at = lengths.max(1, keepdims=True) if together else lengths
    long = np.broadcast_to(at > MOST, offered.shape)
    living = lengths > 0
    return int((offered * long * living).sum()), int((offered * ~long * living).sum())


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_nothing_is_drafted_once_drafts_lose(rule):
    """Where even right drafts lose there is no trial either; the costs of the start are a fault
    that this law finds.  Under `match` the longest row decides, and the text is plain decoding's.
    """
    dec, together = decoder(rule), rule == "match"
    params = with_contexts((MOST, toys.CAPACITY), CHEAP, DEAR)
    lengths, offered, state = stepped(dec, params, temperature=0.8)
    late, early = late_drafts(lengths, offered, together)
    assert (lengths > MOST).any() and late == 0 and early > 0
    fault = with_contexts((toys.CAPACITY, toys.CAPACITY), CHEAP, DEAR)
    lengths, offered, wrong = stepped(dec, fault, temperature=0.8)
    assert late_drafts(lengths, offered, together)[0] > 0
    if together:
        plain = toys.texts(dec.run(arrays(forced=0), toys.prefill(dec, arrays(), temperature=0.8)))
        assert toys.texts(state) == toys.texts(wrong) == plain


def test_the_costs_of_longer_texts_change_in_the_same_program():
    """And drafts come back where they pay again."""
    dec = decoder("match")
    params = with_contexts((MOST, toys.CAPACITY), CHEAP, DEAR)
    state = dec.run(params, toys.prefill(dec, params))
    stepped(dec, params)
    before = counted.compilations()
    lengths, offered, other = stepped(dec, with_contexts((MOST, 40), DEAR, CHEAP))
    late, early = late_drafts(lengths, offered, True)
    assert late > 0 and early == 0 and toys.texts(other) == toys.texts(state)
    assert counted.compilations() == before


def test_one_context_is_no_context():
    """Equal rows make the choices that a single one makes, number for number."""
    seconds = (1.0, 1.2, 1.5, 1.4, 2.0)
    dec, one = decoder("match"), arrays(seconds)
    *made, alone = stepped(dec, one)
    for table in (((MOST, 40), seconds, seconds), ((9,), seconds)):
        *found, state = stepped(dec, with_contexts(*table))
        for known, each in zip(made, found, strict=True):
            np.testing.assert_array_equal(known, each)
        for part in ("lookup", "drafter"):
            old, new = (getattr(s.proposer, part).trials for s in (alone, state))
            jax.tree.map(np.testing.assert_array_equal, old, new)


def test_a_row_chooses_by_its_own_length_where_its_text_depends_on_drafts():
    """Under `rejection` a batch writes what each row writes alone."""
    dec = decoder("rejection")
    params = with_contexts((MOST, toys.CAPACITY), CHEAP, DEAR)
    whole = dec.run(params, toys.prefill(dec, params, temperature=0.9))
    for row in range(toys.ROWS):
        alone = dec.run(params, toys.prefill(dec, params, rows=[row], temperature=0.9))
        assert toys.texts(alone)[0] == toys.texts(whole)[row]


def test_a_table_is_checked_and_sorted():
    chain = specjax.adaptive(BoundDrafter(specjax.NGram(2)))  # lookup and drafter
    options = len(chain.proposer.options)
    made = specjax.adaptive(
        BoundDrafter(specjax.NGram(2)),
        seconds={4096: [2.0] * options, 1024: [1.0] * options},
    )
    assert made.contexts == (1024, 4096) and [row[0] for row in made.seconds] == [1.0, 2.0]
    for seconds, words in (
        ({}, "seconds={}; pass the times for one context"),
        ({0: [1.0] * options}, "a context of seconds=0 is not allowed"),
        ({1024: [1.0]}, r"seconds=\(1.0,\); pass a time above 0"),
    ):
        with pytest.raises(ValueError, match=words):
            specjax.adaptive(BoundDrafter(specjax.NGram(2)), seconds=seconds)


def test_costs_are_measured_at_the_beginning_and_the_end(monkeypatch):
    """What lies between is interpolated, and all that knows the length is moved to the end."""
    dec, lengths = decoder("match"), []

    def timed(decoder, params, prefill, budget):
        state = prefill()
        whole = {int(state.length.max()) - int(x.max()) for x in lengths_of(state)}
        assert whole <= {0, 1}  # a cache lacks the pending token
        lengths.append(int(state.length.max()))
        seconds = np.array([1.0, 2.0, 3.0, 2.0, 3.0]) * (1 + lengths[-1] / 1024)
        return calibrate.Costs(seconds, 0.1 / len(lengths))

    monkeypatch.setattr(calibrate, "option_costs", timed)
    params = with_contexts((1024, 2048, 4096), *[CHEAP] * 3)
    begins = int(toys.LENGTHS.max())
    how = dec, params, lambda: toys.prefill(dec, params), 1.0, begins
    (first, awake), rows = calibrate.seconds_by_context(*how, 3000)
    assert awake == 0.1  # of the beginning
    assert lengths[0] == begins and 2000 < lengths[1] < 3000
    wanted = [1 + length / 1024 for length in (begins, 2048, 3000)]
    np.testing.assert_allclose(rows[:, 0], wanted, rtol=1e-5)
    np.testing.assert_array_equal(rows[0], first)
    own = Learned(first, np.array([0.5, 0.4]), 0.0, longer=rows).put(params).proposer
    np.testing.assert_allclose(own.seconds, rows, rtol=1e-6)
    # Without room at the end, and with one context, the beginning counts everywhere.
    for given, ends in ((params, begins + 100), (arrays(CHEAP), 3000)):
        (first, _), none = calibrate.seconds_by_context(dec, given, how[2], 1.0, begins, ends)
        own = Learned(first, np.array([0.5, 0.4]), 0.0, longer=none).put(given).proposer
        assert none is None
        np.testing.assert_allclose(own.seconds, np.broadcast_to(first, own.seconds.shape))


def lengths_of(state):
    paths = jax.tree_util.tree_leaves_with_path(state)
    return [x for path, x in paths if getattr(path[-1], "name", None) == "length"]


def test_an_engine_stops_a_drafter_in_long_texts():
    """By the length of each row's own text, beside rows of other lengths; the texts stay."""
    target = LanguageModel(toys.model(), toys.weights(), None, (toys.EOS,), "toy")
    drafters = {
        "draft": specjax.Drafter(*toys.CASES["draft 3"], "draft"),
        "lookup": BoundDrafter(specjax.NGram(3, min_ngram=1)),
    }
    how = {"slots": 3, "capacity": 48, "chunk": 16}
    asked = [
        specjax.Request(
            prompts=[list(range(1, 1 + length))], proposer=name, max_new_tokens=24, seed=length,
            temperature=1.0, eos=[],
        )
        for name, length in (("draft", 5), ("lookup+draft", 11), ("draft", 21), ("lookup", 8))
    ]  # fmt: skip
    plain = [
        specjax.generate(
            target, one.prompts, proposer="none", max_new_tokens=24, seed=one.seed,
            temperature=1.0, eos=[],
        ).tokens[0]
        for one in asked
    ]  # fmt: skip
    seen = {}
    for name, limits in (
        ("law", {"draft": {12: 1, MOST: 2, 40: 0}, "lookup": {MOST: 3, MOST + 1: 0}}),
        ("fault", {"draft": {12: 3, 40: 3}}),  # the drafts of short texts
    ):
        with Engine(target, drafters, drafts_by_context=limits, **how) as made:
            served = [handle.result(60) for handle in [made.submit(one) for one in asked]]
        assert [each.tokens for each in served] == plain
        seen[name] = [offers(one, each) for one, each in zip(asked, served, strict=True)]
    for rows, found in (("law", 0), ("fault", 1)):
        late = sum(most for row in seen[rows] for length, most in row if length > MOST + 1)
        assert (late > 0) == found
    for which in (0, 2):  # of the draft alone
        for length, most in seen["law"][which]:
            assert most == (1 if length <= 12 else 2 if length <= MOST else 0)
    assert any(most == 3 for _, most in seen["fault"][0])


def offers(request, served):
    """The length of the text before each step, and the drafts of the step."""
    made, length = [], len(request.prompts[0])
    for step in served.steps:
        made.append((length, step.offered))
        length += step.written
    return made


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"other": {9: 1}}, "has the name 'other'; the drafters are lookup"),
        ({"lookup": {}}, "is empty: leave it out"),
        ({"lookup": {0: 1}}, "a context of drafts_by_context.*=0 is not allowed"),
        ({"lookup": {9: -1}}, r"\[9\]=-1 is not allowed; it must be a whole number, 0 or"),
        ({"lookup": {9: 0, 12: 1}}, "drafts again after no drafts"),
    ],
)
def test_limits_are_checked_before_anything_is_compiled(limits, words):
    target = LanguageModel(toys.model(), toys.weights(), None, (toys.EOS,), "toy")
    with pytest.raises(ValueError, match=words):
        Engine(target, {"lookup": BoundDrafter(specjax.NGram(3))}, drafts_by_context=limits)
