"""Which option a batch takes whose rows are not equally far."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from compiled_choice import chosen

import specjax
from specjax.proposers import MEASURED, Adaptive, AdaptiveParams
from specjax.proposers.adaptive.choosing import Part
from specjax.proposers.adaptive.policy import POLICY, Policy
from specjax.proposers.adaptive.trials import Trials
from specjax.types import Block

NONE = np.zeros(2, np.float32)
NEVER = Trials(np.zeros(2, np.int32), np.full(2, 99), NONE, NONE)


def choice(remaining, together=True):
    """The first of two rows finds two drafts, of which 1.8 are accepted."""
    gains = np.array([[1, 2.8], [1, 1]], np.float32)
    part = Part("lookup", gains, np.array([True, False]), np.zeros(2, np.float32), NEVER)
    left = None if remaining is None else np.array(remaining)
    alive = np.ones(2, bool) if left is None else left > 0
    return chosen((1, 3), [1, 1.5], [part], alive, left, together)


def test_rows_that_are_behind_decide_for_the_batch():
    """A row that will be done early does not make the others wait for its drafts."""
    assert choice(None).option.tolist() == [1, 1]
    assert choice([40, 10]).option.tolist() == [1, 1]
    assert choice([10, 40]).option.tolist() == [0, 0]
    assert choice([10, 0]).option.tolist() == [1, 1]
    weights = [choice([left, 40]).weight for left in (40, 35, 10)]
    np.testing.assert_allclose([each.sum() for each in weights], 1, rtol=1e-6)
    shares = [float(each[0]) for each in weights]
    assert shares == sorted(shares, reverse=True) and shares[0] == pytest.approx(0.5)


def test_alone_each_row_decides_for_itself():
    assert choice([10, 40], together=False).option.tolist() == [1, 0]


PROPOSER = Adaptive(specjax.NGram(num_drafts=2), None, (1, 3))
INIT = jax.jit(lambda params, prompt: PROPOSER.start(params, prompt, 32))
OBSERVE = jax.jit(PROPOSER.observe)


def observed(counts, drafts, worth=1.0, prior=0.5, together=True):
    """The state before and after a trial of the lookup that took the time of 1.8 steps."""
    rows = len(counts)
    params = AdaptiveParams(
        None, None, np.array([1, 1.8], np.float32), np.int32(MEASURED),
        np.full(2, prior, np.float32), np.full(2, 64),
    )  # fmt: skip
    tokens = np.zeros((rows, 3), np.int32)
    prompt = Block(tokens, tokens[..., None].astype(np.float32), np.full(rows, 3))
    state = INIT(params, prompt)
    trials = dataclasses.replace(state.lookup.trials, pause=np.full(rows, 64, np.int32))
    state = dataclasses.replace(
        state,
        lookup=dataclasses.replace(state.lookup, trials=trials),
        offered=np.array(drafts, np.int32),
        needed=np.full(rows, 1.8, np.float32),
        worth=np.full(rows, worth, np.float32),
        tried=np.array(drafts).astype(bool) | together,
        weight=np.array([0.25, 0.75] if rows == 2 else [1.0], np.float32),
        together=np.full(rows, together),
    )
    block = dataclasses.replace(prompt, count=np.array(counts))
    return state, OBSERVE(params, state, block)


def after_trial(*given, **options):
    """The `Trials` of the lookup before and after it."""
    before, after = observed(*given, **options)
    return before.lookup.trials, after.lookup.trials


@pytest.mark.parametrize(("together", "saved"), [(True, 0.25 * 3 + 0.75 * 1 - 1.8), (False, 1.2)])
def test_a_trial_is_charged_to_all_rows_that_waited(together, saved):
    """A row without drafts also takes the time of the batch's step with drafts."""
    before, after = after_trial([3, 1], [2, 0], together=together)
    change = (after.budget - before.budget)[0]
    assert float(change) == pytest.approx(POLICY.budget_share * 1.8 + saved, abs=1e-5)


@pytest.mark.parametrize(("worth", "pause"), [(1.0, 1), (0.5, 64)])
def test_a_trial_pays_if_it_beats_what_decodes_otherwise(worth, pause):
    """Three tokens in the time of 1.8 steps beat plain decoding, but not a part twice as fast."""
    _, after = after_trial([3], [2], worth, prior=0.9)
    assert int(after.pause[0]) == pause


@pytest.mark.parametrize(("needed", "pause"), [(2.0, 64), (1.75, 32), (1.7, 1)])
def test_drafts_pay_if_they_promise_more_than_their_time(needed, pause):
    """A rate of 0.5 promises 1.75 tokens with two drafts, which must be more than the time; the two
    tokens of the step paid only if they are more than it."""
    proposer = Adaptive(specjax.NGram(2), None, (1, 3), Policy(windows=(8.0,), most=0.5))
    params = AdaptiveParams(
        None, None, np.array([1, needed], np.float32), np.int32(MEASURED),
        np.full(2, 0.5, np.float32), np.full(2, 64),
    )  # fmt: skip
    tokens = np.zeros((1, 2), np.int32)
    prompt = Block(tokens, tokens[..., None].astype(np.float32), np.full(1, 2))
    state = proposer.start(params, prompt, 16)
    state = dataclasses.replace(
        state,
        lookup=dataclasses.replace(
            state.lookup, trials=dataclasses.replace(state.lookup.trials, pause=np.full(1, 64))
        ),
        offered=np.full(1, 2, np.int32),
        needed=np.full(1, needed, np.float32),
    )
    assert proposer.observe(params, state, prompt).lookup.trials.pause.tolist() == [pause]


@pytest.mark.parametrize("together", [True, False])
def test_a_row_that_is_done_teaches_nothing(together):
    """Its drafts were not judged, and its rates, pause and budget stay."""
    before, after = observed([3, 0], [2, 2], together=together)
    for name in ("recent", "by_depth", "weight"):
        old, new = (np.asarray(getattr(state.rates, name)) for state in (before, after))
        np.testing.assert_array_equal(old[1], new[1])
        assert name == "weight" or (old[0] != new[0]).any()
    np.testing.assert_array_equal(after.rates.by_depth[0, 0], [[1, 1], [1, 1]])  # both were right
    assert after.lookup.trials.pause[1] == before.lookup.trials.pause[1]
    _, alone = observed([3, 0], [2, 0], together=together)
    for old, new in zip(jax.tree.leaves(alone.rates), jax.tree.leaves(after.rates), strict=True):
        np.testing.assert_array_equal(old, new)
