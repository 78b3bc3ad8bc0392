"""The laws of decoding under matchers on the host: texts are those of plain decoding with masks by
hand, follow the constrained distribution, and faults are caught.  No package is needed."""

import functools

import constrained_toys as constrained
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_distribution as distribution
from nested import Nested, follows
from toys import TABLES as toys

from specjax import RULES, BlockVerification, Params, Processors, Rejection, Sampling
from specjax.constraints import Matchers
from specjax.decoding import Decoder
from specjax.guided import Guided
from specjax.masks import FREE

CLOSE = {0: 2, 1: 3}
LEAST = [0, 0, 9, 0]
AUTOMATA = [None, constrained.SPECS[1], None, None]
NESTED = [False, False, True, True]
"""The first row is free, the second has an automaton, and the others have matchers."""

PAIRS = [("none", "match"), ("draft 3", "match"), ("tree", "rejection")]
ALL = PAIRS


def guided(case, rule, kind=Guided):
    dec = Decoder(toys.model(), toys.CASES[case][0], RULES[rule](), (toys.EOS,), toys.CAPACITY)
    begin = functools.partial(Nested, toys.VOCAB, CLOSE, toys.EOS)
    return kind(dec, [begin if one else None for one in NESTED], toys.LENGTHS)


def processors():
    automata = [None if spec is None else constrained.automaton(spec) for spec in AUTOMATA]
    return Processors.create(toys.ROWS, toys.VOCAB, constraint=automata, min_new_tokens=LEAST)


def params(case):
    return Params(toys.weights(), toys.CASES[case][1])


def decode(case, rule, temperature=0.0, steps=(2**31 - 1,)):
    runner, arrays = guided(case, rule), params(case)
    state = toys.prefill(runner, arrays, temperature=temperature, processors=processors())
    for count in steps:
        state = runner.run(arrays, state, count)
    return toys.texts(state), jax.device_get(state.replace(key=None))


decoded = functools.cache(decode)


def process(row, text, logits):
    """The reference: the logits of a row after a text."""
    if not NESTED[row]:
        return constrained.process(row, text, logits, AUTOMATA, LEAST)
    output = text[toys.LENGTHS[row] :]
    may, complete = follows(output, toys.VOCAB, CLOSE, toys.EOS)
    kept = [*may, *([toys.EOS] if complete and len(output) >= LEAST[row] else [])]
    masked = np.full_like(logits, -np.inf)
    masked[kept] = logits[kept]
    return masked


def outputs(texts):
    return [text[length:] for text, length in zip(texts, toys.LENGTHS, strict=True)]


@functools.cache
def naive():
    return toys.naive_greedy(toys.PROMPTS, toys.LENGTHS, toys.LIMITS, process=process)


def fits(row, output):
    """Is each token one that may follow those before it?"""
    if not NESTED[row]:
        return constrained.valid(AUTOMATA[row], output)
    for n, token in enumerate(output):
        may, complete = follows(output[:n], toys.VOCAB, CLOSE, toys.EOS)
        if token not in may and not (token == toys.EOS and complete):
            return False
    return True


@pytest.mark.parametrize(("case", "rule"), ALL)
def test_greedy_speculation_is_greedy_decoding(case, rule):
    """The tokens are those of decoding without a cache, with masks in plain Python."""
    texts, state = decoded(case, rule)
    assert texts == naive()
    if case in ("draft 3", "tree"):
        assert state.stats.accepted[2:].sum() > 0


@pytest.mark.parametrize(("case", "rule"), ALL)
def test_sampled_texts(case, rule):
    """They fit, and with `match` every proposer gives the text of plain decoding."""
    texts, _ = decoded(case, rule, 1.0)
    made = outputs(texts)
    assert all(fits(row, output) for row, output in enumerate(made))
    assert texts != naive() and len(made[2]) >= LEAST[2]
    if rule == "match":
        assert texts == decoded("none", rule, 1.0)[0]


def test_the_language_is_worth_testing():
    """Brackets of both kinds nest, and a text ends."""
    made = [*outputs(naive()), *outputs(decoded("none", "match", 1.0)[0])]
    deep = [max(np.cumsum([(t in CLOSE) - (t in CLOSE.values()) for t in one])) for one in made]
    assert max(deep) >= 2
    assert any(set(CLOSE.values()) & set(one) for one in made[2:4])
    assert made[2:4] != outputs(toys.naive_greedy(toys.PROMPTS, toys.LENGTHS, toys.LIMITS))[2:]


def test_matchers_follow_from_the_text():
    """A run that is left after two steps goes on as if it had not been."""
    assert decode("draft 3", "match", 1.0, (2, 1, 100))[0] == decoded("draft 3", "match", 1.0)[0]


def test_a_stream_is_a_run_and_rows_can_be_stopped():
    runner, arrays = guided("draft 3", "match"), params("draft 3")
    states = runner.stream(arrays, toys.prefill(runner, arrays, processors=processors()), 1)
    next(states)
    stop = np.arange(toys.ROWS) == 2
    states.send(stop)
    *_, last = states
    texts, whole = toys.texts(last), decoded("draft 3", "match")[0]
    assert texts[3] == whole[3] and len(texts[2]) < len(whole[2])


def flat(self, masks, tokens, parent, done):
    """Deliberate fault: one mask for all nodes, that of the root."""
    masks[:] = masks[:, :1]
    return masks


def unmasked(self, masks, tokens, parent, done):
    """Deliberate fault: the root of each window is not masked."""
    made = _tree(self, masks, tokens, parent, done)
    made[:, 0] = FREE
    return made


_tree = Matchers.tree


class Late(Guided):
    """Deliberate fault: the first token of each window is left out of what matchers know."""

    def _matchers(self, state):
        made = super()._matchers(state)
        observe = made.observe

        def late(emitted, count):
            observe(emitted[:, 1:], np.maximum(count - 1, 0))

        made.observe = late
        return made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("fault", [flat, unmasked, Late])
def test_deliberate_faults_are_caught(fault, temperature, monkeypatch):
    """Another text, or one that the matcher refuses."""
    if fault is not Late:
        monkeypatch.setattr(Matchers, "tree", fault)
    runner = guided("draft 3", "match", fault if fault is Late else Guided)
    arrays = params("draft 3")
    state = toys.prefill(runner, arrays, temperature=temperature, processors=processors())
    try:
        texts = toys.texts(runner.run(arrays, state))
    except ValueError as error:
        assert "may not follow the text of prompt" in str(error)
    else:
        assert texts != decoded("none", "match", temperature)[0]


def test_a_matcher_without_a_way_on_is_named():
    """Such as one whose vocabulary cannot write what it needs."""

    class Stuck(Nested):
        called = "a text that gets stuck"

        def allowed(self, words):
            words[:] = 0

    stuck = Stuck(toys.VOCAB, CLOSE, toys.EOS)
    made = Matchers([None, stuck], np.full((2, 4), toys.EOS), 1)
    with pytest.raises(ValueError, match="prompt 1 under a text that gets stuck: no token"):
        made.roots(3, np.zeros(2, bool))
    assert (made.roots(3, np.array([False, True])) == FREE).all()


SMALL, END = {0: 1}, 4


@functools.cache
def joint():
    """[VOCAB] * NEW: the joint distribution of texts, by reading every text plainly."""
    shape = (distribution.VOCAB,) * distribution.NEW
    prompt, chances = list(distribution.PROMPT), np.zeros(shape)
    every = np.array(list(np.ndindex(shape)))
    logits = toys.plain_logits(
        [prompt + new.tolist() for new in every], distribution.NET, distribution.weights()
    )
    for new, rows in zip(every.tolist(), logits, strict=True):
        chance, end = 1.0, new.index(END) + 1 if END in new else len(new)
        for n, token in enumerate(new[:end]):
            may, complete = follows(new[:n], distribution.VOCAB, SMALL, END)
            kept = sorted(may | ({END} if complete else set()))
            if token not in kept:
                chance = 0.0
                break
            x = np.exp(np.float64(rows[len(prompt) + n - 1][kept]))
            chance *= x[kept.index(token)] / x.sum()
        if all(token == 0 for token in new[end:]):
            chances[tuple(new)] += chance
    assert abs(chances.sum() - 1) < 1e-5 and (chances > 0).sum() >= 8
    return chances / chances.sum()


@pytest.mark.parametrize(("case", "rule"), [
    ("draft tree", Rejection()),
    pytest.param("draft", BlockVerification(), marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_samples_follow_the_constrained_target(case, rule):
    """Chi-square test over all texts."""
    proposer, own = distribution.CASES[case]
    rows, start = distribution.EACH // 2, len(distribution.PROMPT)
    dec = Decoder(distribution.NET, proposer, rule, (END,), distribution.CAPACITY)
    begin = functools.partial(Nested, distribution.VOCAB, SMALL, END)
    runner = Guided(dec, [begin] * rows, np.full(rows, start))
    arrays = Params(distribution.weights(), own())
    state = runner.run(arrays, runner.prefill(
        arrays,
        prompt=jnp.tile(jnp.array(distribution.PROMPT), (rows, 1)),
        prompt_length=jnp.full(rows, start),
        limit=jnp.full(rows, distribution.CAPACITY),
        sampling=Sampling.create(rows),
        key=toys.keys(rows, seed=31),
    ))  # fmt: skip
    sample = np.asarray(state.tokens)[:, start : distribution.CAPACITY]
    inside = np.arange(start, distribution.CAPACITY) < np.asarray(state.length)[:, None]
    assert distribution.chi_square(np.where(inside, sample, 0), joint()) > distribution.IMPLAUSIBLE
    assert state.stats.accepted.sum() > 0.05 * state.stats.tested.sum()
