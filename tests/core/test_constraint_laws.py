"""The laws of decoding under constraints, for every proposer and exact rule: texts are complete,
equal plain constrained decoding, and follow the constrained distribution."""

import functools

import constrained_toys as constrained
import counted
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_distribution as distribution
from toys import TABLES as toys

from specjax import (
    RULES,
    BlockVerification,
    Decoder,
    FirstOf,
    Forced,
    Match,
    Params,
    Processors,
    Rejection,
    Sampling,
    metrics,
)

PAIRS = [
    *toys.FEW,
    ("forced", "match"),
    ("forced", "rejection"),
    ("forced, then a draft", "rejection"),
]
SHARED = [name for name, rule in RULES.items() if rule.shared_noise and rule.exact]
PERFECT = Params(toys.weights(), toys.weights())
OWN = {
    "forced, then a draft": (
        FirstOf(Forced(3), toys.CASES["draft 3"][0]),
        (None, toys.CASES["draft 3"][1]),
    ),
}
CASES = {**toys.CASES, **OWN}


def processors(specs=None, **settings):
    automata = [
        None if spec is None else constrained.automaton(spec) for spec in specs or constrained.SPECS
    ]
    return Processors.create(
        toys.ROWS, toys.VOCAB, constraint=automata,
        **({"min_new_tokens": constrained.LEAST} | settings),
    )  # fmt: skip


def decoder(case, rule, kind=Decoder):
    return kind(toys.model(), CASES[case][0], RULES[rule](), (toys.EOS,), toys.CAPACITY, None, 2)


def params(case):
    return Params(toys.weights(), CASES[case][1])


def run(dec, arrays, made=None, **changes):
    made = processors() if made is None else made
    return dec.run(arrays, toys.prefill(dec, arrays, processors=made, **changes))


@functools.cache
def decoded(case, rule, temperature=0.0):
    state = run(decoder(case, rule), params(case), temperature=temperature)
    return toys.texts(state), jax.device_get(state.replace(key=None))


def outputs(texts):
    return [text[length:] for text, length in zip(texts, toys.LENGTHS, strict=True)]


def test_the_constraints_are_worth_testing():
    """Each changes its text, and a limit and the fewest tokens matter."""
    free = toys.naive_greedy(toys.PROMPTS, toys.LENGTHS, toys.LIMITS)
    texts = constrained.naive()
    assert texts[0] == free[0] and all(texts[row] != free[row] for row in (1, 2, 3))
    for changes in ({"least": [0] * 4},):
        other = toys.naive_greedy(
            toys.PROMPTS, toys.LENGTHS, toys.LIMITS,
            process=functools.partial(constrained.process, **changes),
        )  # fmt: skip
        assert other != texts
    assert any(text[-1] == toys.EOS for text in texts)
    assert any(text[-1] != toys.EOS for text in texts[1:])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("case", "rule"), PAIRS)
def test_every_text_is_complete(case, rule, temperature):
    texts, _ = decoded(case, rule, temperature)
    for spec, output, least in zip(
        constrained.SPECS, outputs(texts), constrained.LEAST, strict=True
    ):
        assert constrained.valid(spec, output)
        assert len(output) >= least


@pytest.mark.parametrize(("case", "rule"), PAIRS)
def test_greedy_speculation_is_greedy_decoding(case, rule):
    """The tokens are those of decoding without a cache, with masks in plain Python."""
    texts, state = decoded(case, rule)
    assert texts == constrained.naive()
    if case.startswith(("draft", "tree", "forced")):
        assert state.stats.accepted.sum() > 0


@pytest.mark.parametrize(("case", "rule"), [
    pair for pair in PAIRS if (pair.values if hasattr(pair, "values") else pair)[1] in SHARED
])  # fmt: skip
def test_same_key_same_tokens(case, rule):
    """At temperature 1 every proposer gives the text of plain constrained decoding."""
    texts, _ = decoded(case, rule, 1.0)
    assert texts == decoded("none", rule, 1.0)[0]
    assert texts != constrained.naive()


@pytest.mark.parametrize("rule", SHARED)
def test_forced_tokens_cost_no_pass(rule):
    """They are accepted at every temperature, where they are the only way on."""
    plain, forced = decoded("none", rule, 1.0), decoded("forced", rule, 1.0)
    assert metrics.acceptance_rate(forced[1].stats) == 1
    assert forced[1].stats.target_passes[1] < 0.7 * plain[1].stats.target_passes[1]
    assert forced[1].stats.proposed[0] == 0


@pytest.mark.parametrize(("case", "rule"), [("draft 3", "match"), ("tree", "rejection")])
def test_log_probabilities_are_those_of_the_text_read_plainly(case, rule):
    texts, state = decoded(case, rule, 1.0)
    padded = np.array([text + [0] * (toys.CAPACITY - len(text)) for text in texts], np.int32)
    plain = toys.plain_logits(padded)
    for row, text in enumerate(texts):
        start = toys.LENGTHS[row]
        logprobs = state.logprobs.row(row, start, len(text) - start)
        for n, at in enumerate(range(start, len(text))):
            raw = np.asarray(jax.nn.log_softmax(plain[row, at - 1]))
            masked = constrained.process(row, text[:at], plain[row, at - 1])
            warped = np.asarray(jax.nn.log_softmax(masked))
            np.testing.assert_allclose(logprobs.raw[n], raw[text[at]], atol=1e-4)
            np.testing.assert_allclose(logprobs.warped[n], warped[text[at]], atol=1e-4)


@pytest.mark.parametrize("rule", [Match(), Rejection()], ids=["match", "rejection"])
def test_a_perfect_draft_is_always_accepted(rule):
    """The draft's distributions are masked by the state after its own path."""
    dec = Decoder(toys.model(), CASES["draft 3"][0], rule, (toys.EOS,), toys.CAPACITY)
    state = run(dec, PERFECT, temperature=1.0)
    assert metrics.acceptance_rate(state.stats) == 1


@pytest.mark.parametrize(("case", "rule"), [("draft 3", "match"), ("tree", "rejection")])
def test_an_inserted_row_is_that_row_alone(case, rule):
    """An inserted row brings its automaton and its state; rows without one can be replaced too."""
    dec, arrays = decoder(case, rule), params(case)

    def begun(**rows):
        return toys.prefill(dec, arrays, temperature=1.0, processors=processors(), **rows)

    state = dec.insert(dec.run(arrays, begun(), 2), 0, begun(rows=[2]))
    state = dec.insert(state, 3, begun(rows=[0]))
    texts = decoded(case, rule, 1.0)[0]
    assert toys.texts(dec.run(arrays, state)) == [texts[2], texts[1], texts[2], texts[0]]


def test_other_constraints_are_no_other_program():
    """Their tables are padded to the same size."""
    dec, arrays = decoder("draft 3", "match"), params("draft 3")
    run(dec, arrays)
    others = [constrained.spec_of(n, 3 + 9 * n, 0.2) for n in range(4)]
    toys.prefill(dec, arrays, processors=processors(others))
    before = len(counted.traces())
    others = [None, *(constrained.spec_of(n, 5 + 40 * n, 0.5) for n in range(3))]
    state = dec.run(arrays, toys.prefill(dec, arrays, processors=processors(others)))
    assert counted.traces(before) == []
    assert all(map(constrained.valid, others, outputs(toys.texts(state))))


def test_without_a_constraint_nothing_is_carried():
    assert Processors.create(2, toys.VOCAB, constraint=None) is None
    assert Processors.create(2, toys.VOCAB, constraint=[None, None]) is None
    kept = Processors.create(2, toys.VOCAB, constraint=None, constraint_size=(256, 128))
    assert kept.automata.next.shape == (2, 256, 128)


class Flat(Decoder):
    """Deliberate fault: one mask for all nodes, that of the root."""

    def _warp(self, state, logits, path=None):
        return super()._warp(state, logits)


class Late(Decoder):
    """Deliberate fault: the first token of each window is left out of the constraint's state."""

    def commit(self, params, state, proposal, verification):
        after, info = super().commit(params, state, proposal, verification)
        late = state.processors.automata.observe(info.tokens[:, 1:], info.count - 1)
        return after.replace(processors=after.processors.replace(automata=late)), info


class Unmasked(Decoder):
    """Deliberate fault: the root of each window is not masked."""

    def _warp(self, state, logits, path=None):
        made = super()._warp(state, logits, path)
        free = super()._warp(state.replace(processors=None), logits, path)
        return made.at[:, 0].set(free[:, 0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("fault", [Flat, Late, Unmasked])
def test_deliberate_faults_are_caught(fault, temperature):
    """Texts are neither complete nor those of plain decoding."""
    state = run(decoder("draft 3", "match", fault), params("draft 3"), temperature=temperature)
    texts = toys.texts(state)
    assert texts != decoded("none", "match", temperature)[0]
    assert not all(map(constrained.valid, constrained.SPECS, outputs(texts)))


SPEC = ([{0: 1, 2: 1, 1: 2}, {1: 0, 3: 2, 0: 2}, {3: 2, 0: 0}], {1, 2})
END = 4
JOINT = (SPEC, {"temperature": 1.2, "top_k": 3, "top_p": 0.95})


@functools.cache
def joint():
    """[VOCAB] * NEW: the joint distribution of constrained texts, by reading every text plainly."""
    spec, settings = JOINT
    shape = (distribution.VOCAB,) * distribution.NEW
    prompt, chances = list(distribution.PROMPT), np.zeros(shape)
    every = np.array(list(np.ndindex(shape)))
    logits = toys.plain_logits(
        [prompt + new.tolist() for new in every], distribution.NET, distribution.weights()
    )
    sampling = Sampling.create(1, **settings)
    for new, rows in zip(every.tolist(), logits, strict=True):
        chance = 1.0
        for n, token in enumerate(new):
            if END in new[:n]:
                break
            kept = constrained.allowed(spec, new[:n], distribution.NEW - n, eos=END)
            x = np.full(distribution.VOCAB, -np.inf, np.float32)
            x[kept] = rows[len(prompt) + n - 1][kept]
            chance *= float(
                jax.nn.softmax(distribution.warp(jnp.asarray(x)[None, None], sampling))[0, 0, token]
            )
            if not chance:
                break
        end = new.index(END) + 1 if END in new else len(new)
        if all(token == 0 for token in new[end:]):
            chances[tuple(new)] += chance
    assert abs(chances.sum() - 1) < 1e-5 and (chances > 0).sum() >= 8
    return chances / chances.sum()


@pytest.mark.parametrize(("case", "rule"), [
    ("draft", Rejection()), ("draft", BlockVerification()), ("draft tree", Rejection()),
    ("eagle3, a reduced vocabulary", Rejection()), ("universal", Rejection()),
    ("forced", Rejection()), ("draft", Match()),
], ids=str)  # fmt: skip
def test_samples_follow_the_constrained_target(case, rule):
    """Chi-square test over all texts, with top-k and top-p behind the mask."""
    proposer, own = distribution.CASES.get(case) or (Forced(2), lambda: None)
    rows, start = distribution.EACH, len(distribution.PROMPT)
    dec = Decoder(distribution.NET, proposer, rule, (END,), distribution.CAPACITY)
    arrays = Params(distribution.weights(), own())
    spec, settings = JOINT
    automaton = constrained.automaton(spec, distribution.VOCAB)
    state = dec.run(arrays, dec.prefill(
        arrays,
        jnp.tile(jnp.array(distribution.PROMPT), (rows, 1)),
        jnp.full(rows, start),
        limit=jnp.full(rows, distribution.CAPACITY),
        sampling=Sampling.create(rows, **settings),
        key=toys.keys(rows, seed=29),
        processors=Processors.create(rows, distribution.VOCAB, constraint=automaton),
    ))  # fmt: skip
    sample = np.asarray(state.tokens)[:, start : distribution.CAPACITY]
    inside = np.arange(start, distribution.CAPACITY) < np.asarray(state.length)[:, None]
    assert distribution.chi_square(np.where(inside, sample, 0), joint()) > distribution.IMPLAUSIBLE
    if case != "forced":
        assert state.stats.accepted.sum() > 0.1 * state.stats.tested.sum()
