"""`Adaptive` drafts where it pays: choices, widths, drafts that rest, and what is learned."""

import dataclasses

import counted
import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import TABLES as toys
from watched import Watched

import specjax
from specjax import RULES, Decoder, NGram, Params
from specjax.contract import Context
from specjax.generate import learned_of, prepared
from specjax.proposers import MEASURED, PAUSE, Adaptive, AdaptiveParams, Chain, DraftSource
from specjax.proposers.adaptive import FIRST
from specjax.proposers.rates import Rates
from specjax.proposers.trials import Trials
from specjax.tune import Learned
from specjax.types import ABSENT, Proposal

WIDTHS = (1, 2, 4)
LOOKUP, DRAFT = NGram(3, min_ngram=1), toys.CASES["draft 3"]
PROPOSER = Adaptive(LOOKUP, DRAFT[0], WIDTHS)
INF = float("inf")
PLAIN = toys.decoded("none", "match")[0]
WATCHED = Watched(toys.model())


def arrays(seconds=(1.0,) * 5, forced=MEASURED, prior=(0.5, 0.4)):
    own = AdaptiveParams(
        None, DRAFT[1], jnp.array(seconds, jnp.float32), jnp.array(forced, jnp.int32),
        jnp.array(prior, jnp.float32), jnp.full(2, PAUSE, jnp.int32),
    )  # fmt: skip
    return Params(toys.weights(), own)


def judged(accepted, of=99.0, depth=3, together=False):
    """Rates of rows with so many accepted drafts, by every window and at each depth."""
    counts = jnp.array([[of, each] for each in np.asarray(accepted)], jnp.float32)
    prior, rows = jnp.float32(0.5), len(counts)
    start = Rates.start(rows, depth, prior)
    counted = dataclasses.replace(
        start,
        recent=jnp.broadcast_to(counts[:, None], start.recent.shape),
        by_depth=jnp.broadcast_to(counts[:, None], start.by_depth.shape),
    )
    nothing = jnp.zeros(rows, jnp.int32)
    return counted.after(nothing, nothing, prior, jnp.array(together))


def stacked(*parts):
    """`AdaptiveState.rates` of parts with these rates."""
    return jax.tree.map(lambda *each: jnp.stack(each, axis=1), *parts)


def decoder(target=None, draft=None):
    proposer = PROPOSER
    if draft is not None:
        proposer = Adaptive(LOOKUP, Chain(DraftSource(draft, toys.VOCAB), 3), WIDTHS)
    return Decoder(target or toys.model(), proposer, RULES["match"](), (toys.EOS,), toys.CAPACITY)


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
    target, draft = Watched(toys.model()), Watched(toys.model())
    dec = decoder(target, draft)
    seen = {}
    for name, seconds in {
        "plain": (1, INF, INF, INF, INF),
        "lookup": (1, 1, 1, INF, INF),
        "one draft": (1, INF, INF, 1, INF),
        "drafts": (1, INF, INF, INF, 1),
        "all": (1, 1, 1, 1, 1),
    }.items():
        params = arrays(seconds)
        state = toys.prefill(dec, params, rows=[0])
        traced = len(target.traced) + len(draft.traced)
        jax.effects_barrier()
        target.widths.clear(), draft.widths.clear()
        state = dec.run(params, state)
        jax.effects_barrier()
        seen[name] = set(target.widths), len(draft.widths)
        assert toys.texts(state) == PLAIN[:1]
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
    dec, params = decoder(target), arrays((1, INF, INF, INF, INF), option)
    state = toys.prefill(dec, params)
    jax.effects_barrier()
    target.widths.clear()
    state = dec.run(params, state)
    jax.effects_barrier()
    assert set(target.widths) == {PROPOSER.options[option][1] + 1}
    assert toys.texts(state) == PLAIN


@pytest.mark.parametrize("pauses", [(1,), (2, 1), (5, 3, 4), (9,)])
def test_a_draft_that_rested_drafts_as_if_it_had_not(pauses):
    """After some steps without it, it reads what it missed: the same drafts for the same text."""
    dec, whole = decoder(), toys.decoder("draft 3", "match")
    params, state = arrays(forced=4), toys.prefill(dec, arrays())
    propose, verify, commit = (jax.jit(f) for f in (dec.propose, dec.verify, dec.commit))
    for pause in pauses:
        state = dec.run(arrays(forced=0), state, pause)
        live = ~np.asarray(state.done)
        # The draft alone, which reads all of the text so far at once.
        text, length = np.asarray(state.tokens)[:, : toys.CAPACITY], np.asarray(state.length)
        fresh = toys.prefill(
            whole, toys.params("draft 3"), prompt=text, prompt_length=length,
            limit=np.maximum(toys.LIMITS, length),
        )  # fmt: skip
        wanted, _ = jax.jit(whole.propose)(toys.params("draft 3"), fresh)
        made, after = propose(params, state)
        assert np.asarray(after.proposer.drafted)[live].all() and live.any()
        np.testing.assert_array_equal(made.tokens[live], wanted.tokens[live])
        state, _ = commit(params, after, made, verify(params, after, made))
    assert toys.texts(dec.run(arrays(), state)) == PLAIN


@pytest.mark.parametrize("case", ["draft 3", "draft 6", "eagle3", "early exit", "universal"])
def test_a_chain_up_to_a_depth_is_the_beginning_of_the_whole_one(case):
    """The loop draws the same tokens from the same logits as the chain without a limit."""
    rule = "rejection"
    dec, params = toys.decoder(case, rule), toys.params(case)
    state = dec.run(params, toys.prefill(dec, params, temperature=0.9), 2)

    @jax.jit
    def propose(state, depth):
        context = Context(
            pending=jax.vmap(lambda row, n: row[n - 1])(state.tokens, state.length),
            draw=dec._draw(state),
            warp=lambda logits, path=None: dec._warp(state, logits, path),
            shared_noise=False, wants_logits=True, cache=state.cache, depth=depth,
        )  # fmt: skip
        own = state.cache if dec.proposer.shares_cache else state.proposer
        return dec.proposer.propose(params.proposer, own, context)[0]

    whole = propose(state, None)
    for depth in range(4):
        part = propose(state, jnp.int32(depth))
        present = np.asarray(part.parent != ABSENT)
        wanted = np.array(whole.parent != ABSENT)
        wanted[:, depth + 1 :] = False
        np.testing.assert_array_equal(present, wanted)
        np.testing.assert_array_equal(part.tokens[present], whole.tokens[present])
        parents = np.roll(present, -1, axis=1)
        np.testing.assert_allclose(
            part.logits[parents], whole.logits[parents], rtol=2e-5, atol=2e-5
        )


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
    config = dataclasses.replace(toys.model().module.config, max_positions=512)
    target = Longer(specjax.LinenModel(specjax.Transformer(config)))
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
    # Drafts that seem to pay, the first purse, and 1 % of the time.
    assert extra < 5 * 0.3 + FIRST + 0.01 * 430
    late = [{1: 1.0, 2: 1.1, 4: 1.3}[width] for width in target.widths[250:]]
    assert len(late) + 0.1 <= sum(late) <= 1.01 * len(late)


def test_rows_of_a_batch_share_a_width_only_where_the_text_is_fixed():
    """A row that is sure of its drafts does not choose for the others under `rejection`."""
    for rule, together in (("match", True), ("rejection", False)):
        dec = Decoder(toys.model(), PROPOSER, RULES[rule](), (), toys.CAPACITY)
        params = arrays((1.0, 1.2, 1.5, 1.4, 2.0))
        state = dec.run(params, toys.prefill(dec, params, temperature=0.8), 6)
        first = np.array([1.0, 0.0, 0.0, 0.0])
        trials = Trials.start(jnp.full(toys.ROWS, 9), jnp.zeros(toys.ROWS))
        drafter = dataclasses.replace(state.proposer.drafter, trials=trials)
        silent = dataclasses.replace(state.proposer.lookup, trials=trials)
        rates = stacked(judged(0 * first), judged(99 * first))
        own = dataclasses.replace(state.proposer, drafter=drafter, lookup=silent, rates=rates)
        state = dataclasses.replace(state, proposer=own, done=jnp.zeros(4, bool))
        made, _ = jax.jit(dec.propose)(params, state)
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
    _, after = dec.propose(params, state)
    np.testing.assert_array_equal(after.proposer.length, state.limit - state.length)
    assert len(set(np.asarray(after.proposer.length).tolist())) > 1


def test_a_trial_of_the_drafter_uses_it():
    """Even where the lookup promises more: otherwise the trial would be repeated in every step."""
    dec, params = decoder(), arrays((1.0, 1.1, 1.2, 1.3, 1.4))
    state = dec.run(params, toys.prefill(dec, params), 6)
    sure, unsure = (judged(np.full(toys.ROWS, each), together=True) for each in (99.0, 0.0))
    trials = Trials.start(jnp.full(toys.ROWS, 9), jnp.full(toys.ROWS, 8.0))
    due = dataclasses.replace(trials, quiet=jnp.full(toys.ROWS, 9, jnp.int32))
    own = dataclasses.replace(
        state.proposer,
        lookup=dataclasses.replace(state.proposer.lookup, trials=trials),
        drafter=dataclasses.replace(state.proposer.drafter, trials=due),
        rates=stacked(sure, unsure),
    )
    left = {"limit": state.length + 20, "done": jnp.zeros(toys.ROWS, bool)}
    state = dataclasses.replace(state, proposer=own, **left)
    _, after = jax.jit(dec.propose)(params, state)
    assert after.proposer.tried.all() and after.proposer.drafted.all()
    assert not after.proposer.drafter.trials.quiet.any()
    rested = dataclasses.replace(state, proposer=dataclasses.replace(
        own, drafter=dataclasses.replace(own.drafter, trials=trials)
    ))  # fmt: skip
    _, after = jax.jit(dec.propose)(params, rested)
    assert (after.proposer.offered[~after.proposer.drafted] > 0).any()
    assert not after.proposer.tried.any() and not after.proposer.drafted.any()


# --- generate -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target():
    return specjax.load(folders.target())


@pytest.fixture(scope="module")
def draft():
    return specjax.load(folders.draft())


PROMPTS, NEW = ["the cat the cat", "a dog"], 24


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_default_measures_once_and_keeps_the_text(target, draft, temperature, stream):
    """The first call measures every option; a second one compiles and measures nothing."""
    how = {"temperature": temperature, "max_new_tokens": NEW, "seed": 3}
    plain = specjax.generate(target, PROMPTS, proposer="none", **how)
    assert plain.choices is None
    for more in ({}, {"draft": draft}, {"proposer": "auto", "draft": draft, "num_drafts": 2}):
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
        assert {name for name, _ in names[1:]} == {"lookup", *(["drafter"] if more else [])}
        assert max(depth for _, depth in names) == more.get("num_drafts", 8)
        assert np.isfinite(seconds).all() and (seconds >= seconds[0]).all() and seconds[0] > 0
        assert "steps chosen from plain" in str(first) and "lookup of 2: " in str(first)


def test_acceptance_is_learned_from_text_to_text(target):
    """The rates of all rows move the prior of their part; a call starts with the learned figures,
    and the parameters get them without another program."""
    learned = Learned(np.ones(4), np.array([0.5, 0.4]), 0.0)
    rates = judged([9.0, 1.0], of=10.0)
    learned.learn_rates(0, rates)
    np.testing.assert_allclose(learned.prior, [(10 + 40 * 0.5) / 60, 0.4])
    call = prepared(target, PROMPTS, max_new_tokens=NEW)
    put = learned.put(call.params).proposer
    np.testing.assert_allclose(put.prior, learned.prior)
    np.testing.assert_allclose(put.seconds, 1)
    state = call.decoder.run(call.params, call.prefill(call.params))
    before = counted.compilations()
    again = call.decoder.run(learned.put(call.params), call.prefill(learned.put(call.params)))
    assert counted.compilations() == before
    assert toys.texts(state) == toys.texts(again)
    learned.learn(again)
    assert learned.prior.shape == (2,) and learned.prior[1] == 0.4


def test_what_did_not_pay_in_earlier_texts_is_tried_late(target):
    """After 40 judged drafts a part is known, and a text begins with a long pause of it."""
    learned = Learned(np.ones(4), np.array([0.5, 0.4]), 0.0)
    assert learned.pause.tolist() == [PAUSE, PAUSE]
    rates = judged([1.0], of=25.0)
    learned.learn_rates(1, rates)
    assert learned.pause.tolist() == [PAUSE, PAUSE]
    learned.learn_rates(1, rates)
    assert learned.pause.tolist() == [PAUSE, 64]
    call = prepared(target, PROMPTS, max_new_tokens=NEW)
    assert learned.put(call.params).proposer.pause.tolist() == [PAUSE, 64]


def test_a_call_begins_with_what_earlier_calls_learned(target, draft):
    """That includes the pause before the first drafts of a part that did not pay."""
    how = {"draft": draft, "proposer": "auto", "max_new_tokens": NEW}
    first = specjax.generate(target, PROMPTS[0], **how)
    learned = learned_of(prepared(target, PROMPTS[0], **how))
    learned.seconds[:] = [1, *[3] * (len(learned.seconds) - 1)]
    for judged, drafts in ((0, True), (100, False)):
        learned.prior[:], learned.judged[:] = 0.01, judged
        out = specjax.generate(target, PROMPTS[0], **how)
        assert out.tokens == first.tokens
        assert (out.stats.tested > 0) == drafts


@pytest.mark.parametrize(("rate", "pause"), [(0.1, 64), (0.7, PAUSE)])
def test_what_nearly_pays_by_the_prior_is_tried_soon(rate, pause):
    """Three drafts at the price of a second pass gain 0.56 or 1.27 times plain decoding."""
    params = arrays((1, 9, 9, 9, 2), prior=(rate, rate))
    own = dataclasses.replace(params.proposer, pause=jnp.array([7, 64], jnp.int32))
    state = toys.prefill(decoder(), dataclasses.replace(params, proposer=own))
    assert set(np.asarray(state.proposer.lookup.trials.pause).tolist()) == {7}
    assert set(np.asarray(state.proposer.drafter.trials.pause).tolist()) == {pause}


def test_a_drafter_takes_the_place_of_the_draft(target, draft):
    """With "auto", chains of a passed drafter are a part of the choice; the text is the same."""
    heads = specjax.MedusaAdapter.create(target, 2)
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
    made = specjax.make_drafter(target, draft, num_drafts=4)
    times = [1.0, 1.1, 1.3, 1.5, 2.0]
    fixed = specjax.adaptive(made, seconds=times)
    assert fixed.proposer.options[-1] == ("drafter", 4)
    out = specjax.generate(target, PROMPTS, drafter=fixed, max_new_tokens=NEW)
    assert out.choices is None
    plain = specjax.generate(target, PROMPTS, proposer="none", max_new_tokens=NEW)
    assert out.tokens == plain.tokens


def test_what_cannot_be_is_refused(target, draft):
    tree = specjax.Drafter(toys.CASES["best first"][0], name="heads")
    chain = specjax.make_drafter(target, draft, num_drafts=4)
    for arguments, words in (
        ((tree,), "drafts trees"),
        ((chain, NGram(3)), r"draft \[3, 4\] tokens deep"),
        (("ngram",), "drafter='ngram' is not a drafter"),
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
