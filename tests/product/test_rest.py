"""An `Adaptive` proposer rests where to choose takes more time than its drafts save."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adaptive_cases import PROPOSER, arrays
from toys import TABLES as toys

from specjax import RULES, Decoder, Params
from specjax.proposers import RESTS, Adaptive
from specjax.proposers.adaptive.rest import LONGEST, Rest
from specjax.tuning import OptionClock, costs_of, option_costs
from specjax.types import ABSENT

pytestmark = pytest.mark.xdist_group("rest")  # a share takes all of them, or none

ROWS = 2


def after(rest, saved, cost):
    return rest.after(jnp.full(ROWS, saved, jnp.float32), jnp.float32(cost))


def rests(saved, cost, steps, start=0.0):
    """The rests of a text whose awake steps save these times in turn."""
    rest, found = Rest.start(ROWS, jnp.float32(start), jnp.float32(cost)), []
    for step in range(steps):
        rest = after(rest, saved[step % len(saved)], cost)
        assert len(set(np.asarray(rest.steps).tolist())) == 1
        found.append(int(rest.steps[0]))
    return found


def test_rests_get_longer_while_drafts_save_less_than_choosing_costs():
    """Four steps are awake between two; a text after good ones is awake for eight at first, and its
    first rests are short."""
    found = rests([0.0], 0.1, 16)
    assert [n for n in found if n] == [16, 32, 32, 32]
    assert [step for step, n in enumerate(found, 1) if n] == [4, 8, 12, 16]
    later = [n for n in rests([0.0], 0.1, 200, start=0.5) if n]
    assert later[:5] == [4, 8, 16, 32, 32]
    awake = rests([0.0], 0.1, 400)
    assert 400 / (400 + sum(awake)) < 0.12


def test_it_does_not_rest_where_drafts_save_more():
    """The mean counts, so one step of many may save all that the others cost; without a cost of
    choosing there is nothing to win, also where drafts fail."""
    assert not any(rests([0.0, 0.0, 0.0, 1.0], 0.1, 300, start=1.0))
    assert not any(rests([0.0], 0.0, 300)) and not any(rests([-0.1], 0.0, 300))
    assert any(rests([0.0, 0.0, 0.0, 0.3], 0.1, 300))


@pytest.fixture
def clock():
    params = given()
    dec = decoder()
    return OptionClock(dec, params, lambda: toys.prefill(dec, params))


def test_drafts_are_weighed_against_steps_at_rest(clock):
    """A step that chooses takes as long as 1.25 steps at rest.  This quarter is subtracted from the
    options of the lookup, and not from those of the drafter, which are compared with rests."""
    assert [name for name, _ in clock.options] == ["plain", *["lookup"] * 2, *["drafter"] * 2]
    assert clock.rests and clock.plain == RESTS
    given = [[4e-3], [5.5e-3], [6e-3], [7e-3, 7.5e-3, 9e-3], [7.5e-3]]
    costs = costs_of(clock, given, [5e-3])
    np.testing.assert_allclose(1e3 * costs.seconds, [4.0, 4.5, 5.0, 7.5, 7.5])
    assert costs.awake == pytest.approx(0.25)
    # If choosing seems to take no time, a usual time is taken, or it would never rest.
    assert costs_of(clock, given, [3.9e-3]).awake == pytest.approx(0.015)
    # Without a measurement, and where a step takes long, there is none.
    slow = [[100 * one for one in each] for each in given]
    for samples, awake in ((given, []), (slow, [0.5])):
        costs = costs_of(clock, samples, awake)
        assert costs.awake == 0 and costs.seconds[1] == samples[1][0]


def test_choosing_is_measured_beside_steps_at_rest(clock, monkeypatch):
    """Also where the budget suffices for one turn, which leaves out what can be interpolated."""
    took = {RESTS: 1.0, 0: 1.2, 1: 1.5, 2: 1.7, 3: 2.0, 4: 2.5}
    monkeypatch.setattr(OptionClock, "sample", lambda self, option: 1e-3 * took[option])
    how = clock._decoder, clock._params, clock._prefill
    for budget, wanted in ((100.0, [1, 1.3, 1.5, 2, 2.5]), (-1.0, [1, 1 + 0.5 / 3, 1.5, 1.5, 2.5])):
        costs = option_costs(*how, budget)
        np.testing.assert_allclose(1e3 * costs.seconds, wanted)
        assert costs.awake == pytest.approx(0.2)


def test_a_step_that_saved_much_keeps_it_awake():
    """The next rest comes eight steps later, and is short again."""
    rest = Rest.start(ROWS, jnp.float32(0.0), jnp.float32(0.3))
    for _ in range(60):
        rest = after(rest, 0.0, 0.3)
    assert int(rest.pause[0]) == LONGEST
    rest = after(rest, 3.0, 0.3)
    for step in range(8):
        assert not int(rest.steps[0]), step
        rest = after(rest, 0.0, 0.3)
    assert int(rest.steps[0]) == 4


def decoder(rule="match", **changes):
    proposer = dataclasses.replace(PROPOSER, **changes)
    return Decoder(toys.model(), proposer, RULES[rule](), (toys.EOS,), toys.CAPACITY)


def given(saved=0.0, awake=0.9, forced=-1):
    params = arrays((1.0, 1.1, 1.2, 1.3, 1.4), forced)
    own = params.proposer.replace(saved=jnp.float32(saved), awake=jnp.float32(awake))
    return dataclasses.replace(params, proposer=own)


def test_the_text_does_not_depend_on_rests():
    """Rows of several lengths; each run takes as many steps as it may, at rest or not."""
    dec, plain = decoder(), toys.decoded("none", "match")[0]
    texts, drafting = [], []
    for params in (given(awake=0.0), given(), given(forced=RESTS)):
        state = dec.run(params, toys.prefill(dec, params))
        texts.append(toys.texts(state))
        drafting.append(int(np.asarray(state.stats.drafting).sum()))
    assert texts == [plain] * 3
    assert drafting[0] > drafting[2] == 0
    state, taken = toys.prefill(dec, given()), 0
    while not np.asarray(state.done).all():
        state = dec.run(given(), state, 3)
        passes = int(np.asarray(state.stats.target_passes).max())
        assert passes - taken == 3 or np.asarray(state.done).all()
        taken = passes
    assert toys.texts(state) == plain


def test_a_drafter_goes_on_after_a_rest():
    """It has read what was committed meanwhile: its drafts are those of one that never rested."""
    dec = decoder()
    rested = dec.run(given(forced=RESTS), toys.prefill(dec, given()), 9)
    plain = dec.run(given(forced=0), toys.prefill(dec, given()), 9)
    assert int(rested.proposer.rest.seen[0]) < int(plain.proposer.rest.seen[0])
    propose = jax.jit(dec.propose)
    made, wanted = (propose(given(forced=4), state)[0] for state in (rested, plain))
    live = ~np.asarray(plain.done)
    assert live.any()
    np.testing.assert_array_equal(made.tokens[live], wanted.tokens[live])
    np.testing.assert_array_equal(made.parent[live], wanted.parent[live])


def test_a_drafter_that_cannot_be_left_out_misses_nothing():
    """A translated draft keeps the tokens of one step until it drafts again, so nothing rests."""
    inner, own = toys.CASES["universal"]
    adaptive = Adaptive(None, inner, (1, inner.num_nodes))
    dec = Decoder(toys.model(), adaptive, RULES["match"](), (toys.EOS,), toys.CAPACITY)

    def params(forced):
        made = toys.adaptive((1.0, 1.0), own).replace(forced=jnp.int32(forced))
        return Params(toys.weights(), made.replace(saved=jnp.float32(0), awake=jnp.float32(0.9)))

    rested, plain = (dec.run(params(n), toys.prefill(dec, params(n)), 4) for n in (RESTS, 0))
    propose = jax.jit(dec.propose)
    made, wanted = (propose(params(1), state)[0] for state in (rested, plain))
    live = ~np.asarray(plain.done)
    assert (wanted.parent[live, 1:] != ABSENT).any()
    np.testing.assert_array_equal(made.parent[live], wanted.parent[live])
    np.testing.assert_array_equal(made.tokens[live], wanted.tokens[live])


@pytest.mark.parametrize("name", ["eagle3", "best first"])
def test_heads_and_trees_rest_too(name):
    """What waits for a head stays within its buffer; a tree learns nothing from a rest."""
    inner, own = toys.CASES[name]
    adaptive = Adaptive(None, inner, tuple(sorted({1, 2, inner.num_nodes})))
    seconds = tuple(1.0 + 0.1 * depth for _, depth in adaptive.options)
    params = toys.adaptive(seconds, own).replace(saved=jnp.float32(0), awake=jnp.float32(0.9))
    dec = Decoder(toys.model(), adaptive, RULES["match"](), (toys.EOS,), toys.CAPACITY)
    params = Params(toys.weights(), params)
    state = dec.run(params, toys.prefill(dec, params))
    assert toys.texts(state) == toys.decoded("none", "match")[0]
    awake = int(np.asarray(state.proposer.rest.seen - 8).max())
    assert awake < int(np.asarray(state.stats.target_passes).max())


def test_a_step_changes_no_type():
    """Otherwise the next call would compile again."""
    dec = decoder()
    before = toys.prefill(dec, given())
    after = jax.eval_shape(dec.step, given(), before)[0]

    def types(state):
        return [(x.shape, x.dtype, getattr(x, "weak_type", False)) for x in jax.tree.leaves(state)]

    assert types(before) == types(after)


def test_what_never_rests():
    """A rule whose text depends on the drafts, first calls, and parameters without a cost."""
    state = toys.prefill(decoder(), given())
    assert decoder().at_rest(state).proposer.num_nodes == 1
    assert decoder("rejection").at_rest(state) is None
    assert decoder(brief=True).at_rest(state) is None
    bare = toys.prefill(decoder(), arrays())
    assert PROPOSER.rests and bare.proposer.rest is None
    assert PROPOSER.resting(arrays().proposer, bare.proposer, ~bare.done) is None
