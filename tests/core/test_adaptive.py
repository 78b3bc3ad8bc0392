"""`Adaptive` drafts where it pays: choices, widths, drafts that rest, and what is learned."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adaptive_cases import DRAFT, LOOKUP, PROPOSER, WIDTHS, arrays, judged
from toys import TABLES as toys
from watched import Watched

import specjax
from specjax import RULES, Decoder, NGram, Params, Processors
from specjax.methods import DraftSource
from specjax.proposers import AT_ONCE, MEASURED, PAUSE, Adaptive, AdaptiveParams, Chain
from specjax.proposers.adaptive.policy import POLICY, Policy
from specjax.proposers.adaptive.trials import Trials
from specjax.tuning import judged_by_part
from specjax.types import ABSENT, Block, Proposal

INF = float("inf")
WATCHED, WATCHED_DRAFT = Watched(toys.model()), Watched(toys.model())


def plain():
    return toys.decoded("none", "match")[0]


def stacked(*parts):
    """`AdaptiveState.rates` of parts with these rates."""
    return jax.tree.map(lambda *each: np.stack(each, axis=1), *parts)


@functools.cache
def stages(rule="match"):
    """A decoder, and its stages compiled."""
    dec = decoder(rule)
    return dec, *(jax.jit(stage) for stage in (dec.propose, dec.verify, dec.commit))


@functools.cache
def begun(steps):
    """The state of `stages` after some steps, in NumPy arrays: its keys, then all else."""
    dec, params = stages()[0], arrays((1.0, 1.2, 1.5, 1.4, 2.0))
    state = dec.run(params, toys.prefill(dec, params, temperature=0.8), steps)
    return state.key, jax.device_get(state.replace(key=None))


def after_steps(steps, **changes):
    key, state = begun(steps)
    return dataclasses.replace(state, key=key, **changes)


@functools.cache
def whole_chain():
    """A decoder with the draft alone, and its `propose`, compiled."""
    dec = toys.decoder("draft 3", "match")
    return dec, jax.jit(dec.propose)


def decoder(rule="match"):
    """The same for all tests, so that they share its programs."""
    proposer = Adaptive(LOOKUP, Chain(DraftSource(WATCHED_DRAFT, toys.VOCAB), 3), WIDTHS)
    return Decoder(WATCHED, proposer, RULES[rule](), (toys.EOS,), toys.CAPACITY)


def test_the_options():
    """Plain decoding, then each part with each number of drafts."""
    assert PROPOSER.options == (
        ("plain", 0), ("lookup", 1), ("lookup", 3), ("drafter", 1), ("drafter", 3),
    )  # fmt: skip
    assert Adaptive(None, DRAFT[0], WIDTHS).options == (
        ("plain", 0),
        ("drafter", 1),
        ("drafter", 3),
    )


def test_other_times_choose_other_widths_in_one_program():
    """The target reads what the chosen option has, the draft rests where nothing is drafted, and
    the text stays the same."""
    target, draft = WATCHED, WATCHED_DRAFT
    dec = decoder()
    seen = {}
    for name, seconds in {
        "plain": (1, INF, INF, INF, INF),
        "lookup": (1, 1, 1, INF, INF),
        "one draft": (1, INF, INF, 1, INF),
        "drafts": (1, INF, INF, INF, 1),
        "all": (1, 1, 1, 1, 1),
    }.items():
        params = arrays(seconds)
        state = toys.prefill(dec, params)
        traced = len(target.traced) + len(draft.traced)
        jax.effects_barrier()
        target.widths.clear(), draft.widths.clear()
        state = dec.run(params, state)
        jax.effects_barrier()
        seen[name] = set(target.widths), len(draft.widths)
        assert toys.texts(state) == plain()
        assert name == "plain" or len(target.traced) + len(draft.traced) == traced, name
    assert seen["plain"] == ({1}, 0)
    assert seen["lookup"][1] == 0 and max(seen["lookup"][0]) > 1
    assert seen["one draft"][0] <= {1, 2} and 2 in seen["one draft"][0]
    assert 4 in seen["drafts"][0] and seen["drafts"][1] > 0
    assert max(seen["all"][0]) == 4


@pytest.mark.parametrize("option", range(5))
def test_an_option_can_be_forced(option):
    """Every step reads so many tokens, a lookup that finds nothing included."""
    target = WATCHED
    dec, params = decoder(), arrays((1, INF, INF, INF, INF), option)
    state = toys.prefill(dec, params)
    jax.effects_barrier()
    target.widths.clear()
    state = dec.run(params, state)
    jax.effects_barrier()
    assert set(target.widths) == {PROPOSER.options[option][1] + 1}
    assert toys.texts(state) == plain()


def test_nodes_are_judged_one_by_one_as_all_at_once(monkeypatch):
    """Widths that share what judges a node have the logits and verdicts of widths with their own:
    a verification with given noise takes these."""
    monkeypatch.setattr("specjax.decoding.decoder._SMALL", 0)
    dec, propose, *_ = stages()
    processors = Processors.create(4, toys.VOCAB, repetition_penalty=1.3, bad_words=[[3, 4]])
    settings = {
        "temperature": [0.0, 0.9, 0.5, 1.0],
        "top_k": 5,
        "top_p": 0.9,
        "processors": processors,
    }
    state = toys.prefill(dec, arrays(), **settings)
    verify = jax.jit(dec.verify)
    draw, accepted = dec._draw(state), set()
    for option in range(1, len(PROPOSER.options)):
        params = arrays(forced=option)
        proposal, drafted = propose(params, state)
        alone, shared = (verify(params, drafted, proposal, *given) for given in ((draw,), ()))
        count = PROPOSER.options[option][1] + 1
        jax.tree.map(np.testing.assert_array_equal, shared.verdict, alone.verdict)
        jax.tree.map(np.testing.assert_array_equal, shared.output, alone.output)
        np.testing.assert_array_equal(shared.logits[:, :count], alone.logits[:, :count])
        accepted |= set(np.asarray(shared.verdict.node).tolist())
    assert len(accepted) > 1
    longer = dataclasses.replace(dec, capacity=dec.capacity + 1)  # has programs of its own
    texts = {
        option: toys.texts(longer.run(given, toys.prefill(longer, given, **settings)))
        for option in (0, 1, 4)
        for given in [arrays(forced=option)]
    }
    assert texts[0] == texts[1] == texts[4]


@pytest.mark.parametrize("pauses", [(1,), (2, 1), (5, 3, 4), (9,)])
def test_a_draft_that_rested_drafts_as_if_it_had_not(pauses):
    """After some steps without it, it reads what it missed: the same drafts for the same text."""
    dec, propose, verify, commit = stages()
    whole, propose_alone = whole_chain()
    params, state = arrays(forced=4), toys.prefill(dec, arrays())
    for pause in pauses:
        state = dec.run(arrays(forced=0), state, pause)
        live = ~np.asarray(state.done)
        # The draft alone, which reads all of the text so far at once.
        text, length = np.asarray(state.tokens)[:, : toys.CAPACITY], np.asarray(state.length)
        fresh = toys.prefill(
            whole, toys.params("draft 3"), prompt=text, prompt_length=length,
            limit=np.maximum(toys.LIMITS, length),
        )  # fmt: skip
        wanted, _ = propose_alone(toys.params("draft 3"), fresh)
        made, after = propose(params, state)
        assert np.asarray(after.proposer.drafted)[live].all() and live.any()
        drafts, others = np.asarray(made.tokens), np.asarray(wanted.tokens)
        np.testing.assert_array_equal(drafts[live], others[live])
        state, _ = commit(params, after, made, verify(params, after, made))
    assert toys.texts(dec.run(arrays(), state)) == plain()


@dataclasses.dataclass(frozen=True)
class Wrong(NGram):
    """Always drafts, and never what the target says."""

    def propose(self, params, state, context):
        rows = len(context.pending)
        tokens = jnp.broadcast_to(context.pending[:, None], (rows, self.num_nodes))
        never = jnp.full_like(tokens, toys.VOCAB - 1).at[:, 0].set(context.pending)
        parent = jnp.broadcast_to(jnp.arange(self.num_nodes) - 1, tokens.shape)
        return Proposal(never, parent, point_mass=True), state


class Longer(Watched):
    max_positions = 512


def test_trials_that_fail_cost_what_they_may():
    """Drafts that are never right are tried at first, then rarely, and for 1 % of the time."""
    proposer = Adaptive(Wrong(3), None, WIDTHS)
    target = Longer(toys.model())
    dec = Decoder(target, proposer, RULES["match"](), (), 400)
    own = AdaptiveParams(
        None,
        None,
        jnp.array([1.0, 1.1, 1.3]),
        jnp.array(MEASURED, jnp.int32),
        jnp.array([0.5, 0.4]),
        jnp.full(2, PAUSE, jnp.int32),
    )
    params = Params(toys.weights(), own)
    bias = specjax.Processors.create(1, toys.VOCAB, logit_bias={toys.VOCAB - 1: -INF})
    state = toys.prefill(dec, params, rows=[0], limit=np.full(toys.ROWS, 400), processors=bias)
    jax.effects_barrier()
    target.widths.clear()
    state = dec.run(params, state)
    jax.effects_barrier()
    wide = [step for step, width in enumerate(target.widths) if width > 1]
    assert len(target.widths) > 350
    assert wide[:5] == [0, 1, 2, 3, 4]
    extra = sum({1: 0.0, 2: 0.1, 4: 0.3}[width] for width in target.widths)
    # Drafts that seem to pay, the first budget, and 1 % of the time.
    assert extra < 5 * 0.3 + POLICY.first_budget + POLICY.budget_share * 430
    late = [{1: 1.0, 2: 1.1, 4: 1.3}[width] for width in target.widths[250:]]
    assert len(late) + 0.1 <= sum(late) <= 1.01 * len(late)


def resting(budget, unused=0):
    """Trials of all rows with a pause of nine steps."""
    rows = toys.ROWS
    return Trials(np.full(rows, unused, np.int32), np.full(rows, 9, np.int32),
                  np.full(rows, budget, np.float32), np.zeros(rows, np.float32))  # fmt: skip


def test_rows_of_a_batch_share_a_width_only_where_the_text_is_fixed():
    """A row that is sure of its drafts does not choose for the others under `rejection`."""
    for rule, together in (("match", True), ("rejection", False)):
        params, state = arrays((1.0, 1.2, 1.5, 1.4, 2.0)), after_steps(6)
        first = np.array([1.0, 0.0, 0.0, 0.0])
        trials = resting(0.0)
        drafter = dataclasses.replace(state.proposer.drafter, trials=trials)
        silent = dataclasses.replace(state.proposer.lookup, trials=trials)
        rates = stacked(judged(0 * first), judged(99 * first))
        own = dataclasses.replace(state.proposer, drafter=drafter, lookup=silent, rates=rates)
        state = dataclasses.replace(state, proposer=own, done=np.zeros(4, bool))
        made, _ = stages(rule)[1](params, state)
        counts = np.asarray((made.parent != ABSENT).sum(1))
        if together:
            assert len(set(counts.tolist())) == 1
        else:
            assert counts[0] > 0 and (counts[1:] == 0).all()


@dataclasses.dataclass(frozen=True)
class Left(NGram):
    """Remembers what a row may still get in the place of the length of its text."""

    def propose(self, params, state, context):
        made, _ = super().propose(params, state, context)
        return made, dataclasses.replace(state, length=context.remaining)


def test_a_proposer_knows_how_long_a_row_may_go_on():
    """What the limit leaves, for each row."""
    dec = Decoder(toys.model(), Left(3), RULES["match"](), (), toys.CAPACITY)
    params = Params(toys.weights(), None)
    state = dec.run(params, toys.prefill(dec, params), 1)
    _, after = jax.jit(dec.propose)(params, state)
    np.testing.assert_array_equal(after.proposer.length, state.limit - state.length)
    assert len(set(np.asarray(after.proposer.length).tolist())) > 1


def test_a_trial_of_the_drafter_uses_it():
    """Even where the lookup promises more: otherwise the trial would be repeated in every step."""
    params, state, propose = arrays((1.0, 1.1, 1.2, 1.3, 1.4)), after_steps(6), stages()[1]
    sure, unsure = (judged(np.full(toys.ROWS, each), together=True) for each in (99.0, 0.0))
    trials, due = resting(8.0), resting(8.0, unused=9)
    own = dataclasses.replace(
        state.proposer,
        lookup=dataclasses.replace(state.proposer.lookup, trials=trials),
        drafter=dataclasses.replace(state.proposer.drafter, trials=due),
        rates=stacked(sure, unsure),
    )
    left = {"limit": state.length + 20, "done": np.zeros(toys.ROWS, bool)}
    state = dataclasses.replace(state, proposer=own, **left)
    after = jax.device_get(propose(params, state)[1].proposer)
    assert after.tried.all() and after.drafted.all()
    assert not after.drafter.trials.unused.any()
    rested = dataclasses.replace(state, proposer=dataclasses.replace(
        own, drafter=dataclasses.replace(own.drafter, trials=trials)
    ))  # fmt: skip
    after = jax.device_get(propose(params, rested)[1].proposer)
    assert (after.offered[~after.drafted] > 0).any()
    assert not after.tried.any() and not after.drafted.any()


def test_a_trial_of_the_lookup_needs_a_draft():
    """A row with one draft or more is tried, at the time of its step, and another row is not; the
    drafter waits where a row may draft."""
    params, state = arrays((1.0, 1.1, 1.2, 9.0, 9.0)), after_steps(6)
    due, most = resting(0.2, unused=9), np.array([1, 3, 3, 0], np.int32)
    text = state.proposer.lookup.own
    text = dataclasses.replace(text, length=np.where(np.arange(toys.ROWS) == 1, 0, text.length))
    given = types.SimpleNamespace(pending=state.tokens[np.arange(toys.ROWS), state.length - 1])
    found = jax.jit(lambda own: LOOKUP.propose(None, own, given)[0])(text)
    present = np.minimum(np.asarray(found.parent != ABSENT).sum(1), most)
    unsure = judged(np.zeros(toys.ROWS), of=9999.0)
    own = dataclasses.replace(
        state.proposer,
        lookup=dataclasses.replace(state.proposer.lookup, own=text, trials=due),
        drafter=dataclasses.replace(state.proposer.drafter, trials=resting(0.0)),
        rates=stacked(unsure, unsure),
    )
    left = {"limit": state.length + 20, "done": np.zeros(toys.ROWS, bool), "num_drafts": most}
    state = dataclasses.replace(state, proposer=own, **left)
    after = jax.device_get(stages("rejection")[1](params, state)[1].proposer)
    assert present[1] == 0 and 1 in present
    assert after.tried.tolist() == (present > 0).tolist()
    np.testing.assert_allclose(after.needed, np.where(present > 0, 1.1, 1.0), rtol=1e-6)
    assert after.drafter.trials.unused.tolist() == (most > 0).tolist()


def test_a_row_that_may_not_draft_has_no_drafts_of_the_drafter():
    """Not even where the drafter is forced on all rows."""
    most = np.array([1, 0, 3, 0], np.int32)
    left = {"done": np.zeros(toys.ROWS, bool), "num_drafts": most}
    made, after = stages()[1](arrays(forced=4), after_steps(6, **left))
    assert (made.parent != ABSENT).sum(1).tolist() == most.tolist()
    assert after.proposer.drafted.tolist() == (most > 0).tolist()


@pytest.mark.parametrize(("rate", "pause"), [(0.1, 64), (0.7, PAUSE)])
def test_what_nearly_pays_by_the_prior_is_tried_soon(rate, pause):
    """Three drafts at the price of a second pass gain 0.56 or 1.27 times plain decoding."""
    params = arrays((1, 9, 9, 9, 2), prior=(rate, rate))
    own = dataclasses.replace(params.proposer, pause=jnp.array([7, 64], jnp.int32))
    state = toys.prefill(decoder(), dataclasses.replace(params, proposer=own))
    assert set(np.asarray(state.proposer.lookup.trials.pause).tolist()) == {7}
    assert set(np.asarray(state.proposer.drafter.trials.pause).tolist()) == {pause}


def test_the_first_budget_of_each_part_pays_one_trial():
    """It is the cost of the fewest drafts of the part, and of what its drafter reads first."""
    params = arrays((2.0, 2.5, 3.0, 2.8, 4.4), prior=(0.1, 0.1))
    own = dataclasses.replace(params.proposer, pause=jnp.array([64, 64], jnp.int32))
    state = toys.prefill(decoder(), dataclasses.replace(params, proposer=own)).proposer
    passes = np.ceil(64 / (AT_ONCE * PROPOSER.num_nodes))
    late = passes * min((1.4 - 1) / 1, (2.2 - 1) / 3)  # of a draft, in steps without drafts
    np.testing.assert_allclose(state.lookup.trials.budget, 0.25, rtol=1e-5)
    np.testing.assert_allclose(state.drafter.trials.budget, 0.4 + late, rtol=1e-5)


def test_a_part_must_promise_more_than_nearly_all():
    """One draft that is right half of the time, at exactly half the speed of plain decoding."""
    proposer = Adaptive(NGram(1), None, (1, 2), Policy(windows=(8.0,), most=0.5, nearly=0.5))
    tokens = jnp.zeros((1, 3), jnp.int32)
    prompt = Block(tokens, jnp.zeros((1, 3, 1)), jnp.full(1, 3))
    for seconds, pause in ((3.0, 64), (2.9, PAUSE)):
        own = AdaptiveParams(
            None, None, jnp.array([1.0, seconds]), jnp.array(MEASURED, jnp.int32),
            jnp.array([0.5, 0.4]), jnp.full(2, 64, jnp.int32),
        )  # fmt: skip
        state = proposer.start(own, prompt, 16)
        assert state.lookup.trials.pause.tolist() == [pause]


def test_judged_drafts_are_of_the_parts_that_exist():
    rates = stacked(judged([1.0]), judged([9.0]))
    known, both = after_steps(6).proposer, (0, 1)
    for parts in (both, both[:1], both[1:]):
        state = dataclasses.replace(
            known,
            lookup=known.lookup if 0 in parts else None,
            drafter=known.drafter if 1 in parts else None,
            rates=jax.tree.map(lambda x, of=parts: x[:, list(of)], rates),
        )
        found = judged_by_part(state)
        assert {part: float(each[1]) for part, each in found.items()} == {
            part: (1.0, 9.0)[part] for part in parts
        }


def test_a_lookup_that_promises_as_much_drafts():
    """Rows with all drafts of the lookup take them, and the others take those of the drafter."""
    params, state = arrays((1.0, 9.0, 9.0, 9.0, 1.0)), after_steps(6)
    sure = judged(np.full(toys.ROWS, 99.0), together=True)
    own = dataclasses.replace(
        state.proposer,
        lookup=dataclasses.replace(state.proposer.lookup, trials=resting(0.0)),
        drafter=dataclasses.replace(state.proposer.drafter, trials=resting(0.0)),
        rates=stacked(sure, sure),
    )
    left = {"limit": state.length + 20, "done": np.zeros(toys.ROWS, bool)}
    after = jax.device_get(
        stages()[1](params, dataclasses.replace(state, proposer=own, **left))[1].proposer
    )
    assert not after.tried.any() and (after.offered == 3).all()
    assert after.drafted.any() and not after.drafted.all()


def test_trials_learn_from_the_drafts_of_their_own_part():
    """After drafts of one part, the pause of that part changes, and the other keeps its own."""
    params, state = arrays((1.0, 1.2, 1.5, 1.4, 2.0)), after_steps(6)
    rows, trials = toys.ROWS, resting(0.0)
    nothing = Block(*(np.zeros((rows, 4), np.int32), np.zeros((rows, 4, 1))), np.ones(rows, int))
    for drafted, pauses in ((False, (18, 9)), (True, (9, 18))):
        own = dataclasses.replace(
            state.proposer,
            lookup=dataclasses.replace(state.proposer.lookup, trials=trials),
            drafter=dataclasses.replace(state.proposer.drafter, trials=trials),
            rates=stacked(judged(np.zeros(rows)), judged(np.zeros(rows))),
            offered=np.full(rows, 3, np.int32),
            drafted=np.full(rows, drafted),
            worth=np.ones(rows, np.float32),
            needed=np.full(rows, 2.0, np.float32),
        )
        after = jax.jit(PROPOSER.observe)(params.proposer, own, nothing)
        found = after.lookup.trials.pause, after.drafter.trials.pause
        assert [set(each.tolist()) for each in found] == [{each} for each in pauses]
