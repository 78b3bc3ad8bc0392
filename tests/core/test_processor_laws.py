"""The laws of decoding with every processor on, for every proposer and exact rule; and
log-probabilities.

All settings and a user's function are on at once, so that each pair is compiled only once.
"""

import dataclasses
import functools

import counted
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_distribution as distribution
from reference import OFF, no_repeated_pair, no_repeated_pair_reference, reference
from toys import TABLES as toys

from specjax import (
    RULES,
    Decoder,
    Match,
    Params,
    Processors,
    Rejection,
    Sampling,
    eos_of_rows,
    metrics,
)
from specjax.proposers import Chain, DraftSource

WORDS = [[4], [18, 11], [25, 21, 24], [1, 2, 3, 4, 5, 6, 7]]
SETTINGS = [
    {
        "repetition_penalty": 1.05,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "logit_bias": {3: 1.0},
    },
    {},
    {
        "repetition_penalty": 0.8,
        "presence_penalty": 0.25,
        "logit_bias": {8: -2.0, 7: -1.0},
        "min_new_tokens": 3,
    },
    {
        "repetition_penalty": 1.15,
        "frequency_penalty": 0.2,
        "logit_bias": {toys.EOS: 4.0},
        "min_new_tokens": 9,
    },
]
OTHERS = [[5], [9, 12], [2, 24, 21], [7, 6, 5, 4, 3, 2, 1]]
PAIRS = toys.FEW
SHARED = [name for name, rule in RULES.items() if rule.shared_noise and rule.exact]
PERFECT = Params(toys.weights(), toys.weights())
TOP = 2


def processors(shift=0.0):
    """Settings that differ per row; `shift` changes the numbers."""
    rows = [OFF | row for row in SETTINGS]
    settings = {name: [row[name] for row in rows] for name in OFF if name != "bad_words"}
    settings["presence_penalty"] = [value + shift for value in settings["presence_penalty"]]
    return Processors.create(
        toys.ROWS, toys.VOCAB, bad_words=OTHERS if shift else WORDS, **settings
    )


def process(row, text, logits):
    """The reference, with the settings of a row."""
    settings = SETTINGS[row] | {"bad_words": WORDS}
    own = no_repeated_pair_reference
    return reference(logits, text, toys.LENGTHS[row], [toys.EOS], settings, own)


@functools.cache
def naive():
    return toys.naive_greedy(toys.PROMPTS, toys.LENGTHS, toys.LIMITS, process=process)


def decoder(proposer, rule, kind=Decoder):
    return kind(toys.model(), proposer, rule, (toys.EOS,), toys.CAPACITY, no_repeated_pair, TOP)


def run(dec, arrays, shift=0.0, **changes):
    return dec.run(arrays, toys.prefill(dec, arrays, processors=processors(shift), **changes))


@functools.cache
def decoded(case, rule, temperature=0.0):
    state = run(
        decoder(toys.CASES[case][0], RULES[rule]()), toys.params(case), temperature=temperature
    )
    return toys.texts(state), jax.device_get(state.replace(key=None))


def test_the_settings_are_worth_testing():
    """Every processor matters: without any one of them the text is another one."""
    for name in [*OFF, "function"]:

        def without(row, text, logits, name=name):
            settings = {
                k: v for k, v in (SETTINGS[row] | {"bad_words": WORDS}).items() if k != name
            }
            own = None if name == "function" else no_repeated_pair_reference
            return reference(logits, text, toys.LENGTHS[row], [toys.EOS], settings, own)

        assert (
            toys.naive_greedy(toys.PROMPTS, toys.LENGTHS, toys.LIMITS, process=without) != naive()
        ), name


@pytest.mark.parametrize(("case", "rule"), PAIRS)
def test_greedy_speculation_is_greedy_decoding(case, rule):
    """With every processor on and other settings per row, the tokens are those of decoding
    without a cache."""
    texts, state = decoded(case, rule)
    assert texts == naive()
    if case.startswith(("draft", "tree")):
        assert 0 < state.stats.accepted.sum() < state.stats.tested.sum()


@pytest.mark.parametrize(("case", "rule"), [pair for pair in PAIRS if pair.values[1] in SHARED])
def test_same_key_same_tokens(case, rule):
    """At temperature 1 with shared noise, every proposer gives the text of plain decoding."""
    texts, _ = decoded(case, rule, 1.0)
    assert texts == decoded("none", rule, 1.0)[0]
    assert texts != naive()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("case", "rule"), PAIRS)
def test_log_probabilities_are_those_of_the_text_read_plainly(case, rule, temperature):
    """The log-probabilities of accepted, residual and bonus tokens, before and after the warp,
    and the best ones."""
    texts, state = decoded(case, rule, temperature)
    padded = np.array([text + [0] * (toys.CAPACITY - len(text)) for text in texts], np.int32)
    plain = toys.plain_logits(padded)
    for row, text in enumerate(texts):
        start = toys.LENGTHS[row]
        logprobs = state.logprobs.row(row, start, len(text) - start)
        assert logprobs.top.shape == (len(text) - start, TOP)
        for n, at in enumerate(range(start, len(text))):
            raw = np.asarray(jax.nn.log_softmax(plain[row, at - 1]))
            warped = np.asarray(jax.nn.log_softmax(process(row, text[:at], plain[row, at - 1])))
            wanted = 0.0 if temperature == 0 else warped[text[at]]
            np.testing.assert_allclose(logprobs.raw[n], raw[text[at]], atol=1e-4)
            np.testing.assert_allclose(logprobs.warped[n], wanted, atol=1e-4)
            np.testing.assert_allclose(logprobs.top[n], np.sort(raw)[::-1][:TOP], atol=1e-4)
            np.testing.assert_allclose(raw[logprobs.top_ids[n]], logprobs.top[n], atol=1e-4)


@pytest.mark.parametrize("rule", SHARED)
def test_bit_exact_mode(rule):
    """A chain has the same bits as plain decoding of the same width, also its log-probabilities."""
    (texts, chain), (plain, wide) = decoded("draft 3", rule, 1.0), decoded("none padded", rule, 1.0)
    assert texts == plain
    for row, text in enumerate(texts):
        new = (row, toys.LENGTHS[row], len(text) - toys.LENGTHS[row])
        for actual, wanted in zip(
            *(jax.tree.leaves(s.logprobs.row(*new)) for s in (chain, wide)), strict=True
        ):
            assert actual.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", [Match(), Rejection()], ids=["match", "rejection"])
def test_a_perfect_draft_is_always_accepted(rule, temperature):
    """The draft warps its draws by the processors of their own path, so alpha = 1."""
    state = run(decoder(toys.CASES["draft 3"][0], rule), PERFECT, temperature=temperature)
    assert metrics.acceptance_rate(state.stats) == 1


@dataclasses.dataclass(frozen=True)
class Blind(Chain):
    """Warps as if every draft were a child of the root."""

    def propose(self, params, state, context):
        blind = dataclasses.replace(context, warp=lambda logits, path: context.warp(logits))
        return super().propose(params, state, blind)


def test_a_proposer_without_paths_costs_acceptance_alone():
    """Exactness does not depend on the paths."""
    dec = decoder(Blind(DraftSource(toys.model(), toys.VOCAB), 2), Match())
    assert toys.texts(run(dec, PERFECT)) == naive()
    state = run(dec, PERFECT, temperature=1.0)
    assert toys.texts(state) == decoded("none", "match", 1.0)[0]
    assert metrics.acceptance_rate(state.stats) < 1


class Frozen(Decoder):
    """Deliberate fault: the processors' state is frozen during a block."""

    def _warp(self, state, logits, path=None):
        return super()._warp(state, logits)


class BonusOnly(Decoder):
    """Deliberate fault: drafts are verified without processors, which only apply to the bonus
    token."""

    def _warp(self, state, logits, path=None):
        processed = super()._warp(state, logits, path)
        if path is None or path.shape[1] == 1:
            return processed
        plain = super()._warp(state.replace(processors=None), logits)
        last = jnp.arange(logits.shape[1]) == logits.shape[1] - 1
        return jnp.where(last[:, None], processed, plain)


@pytest.mark.parametrize(("fault", "case"), [(Frozen, "draft 3"), (BonusOnly, "draft 1")])
def test_deliberate_faults_are_caught(fault, case):
    """The greedy law fails for each."""
    dec = decoder(toys.CASES[case][0], Match(), fault)
    assert toys.texts(run(dec, toys.params(case))) != naive()


@pytest.mark.parametrize(("case", "rule"), [("draft 3", "match"), ("tree", "rejection")])
def test_an_inserted_row_is_that_row_alone(case, rule):
    """An inserted row brings its settings and what they remember."""
    dec, arrays = decoder(toys.CASES[case][0], RULES[rule]()), toys.params(case)
    state = dec.run(arrays, toys.prefill(dec, arrays, temperature=1.0, processors=processors()), 2)
    state = dec.insert(
        state, 1, toys.prefill(dec, arrays, rows=[0], temperature=1.0, processors=processors())
    )
    texts = decoded(case, rule, 1.0)[0]
    assert toys.texts(dec.run(arrays, state)) == [texts[0], texts[0], *texts[2:]]


def test_rows_of_another_kind_are_refused():
    """A batch that keeps no counts cannot take a row that needs them."""
    dec, arrays = toys.decoder("none", "match"), toys.params("none")
    plain, row = (
        toys.prefill(dec, arrays),
        toys.prefill(dec, arrays, rows=[0], processors=processors()),
    )
    with pytest.raises(ValueError, match="every=True"):
        dec.insert(plain, 0, row)


def test_numbers_do_not_trace():
    """Other penalties, words and temperatures reuse the compiled programs."""
    dec, arrays = decoder(toys.CASES["draft 3"][0], Match()), toys.params("draft 3")
    run(dec, arrays)
    state = toys.prefill(dec, arrays, processors=processors(0.125), temperature=0.7)
    before = len(counted.traces())
    state = toys.prefill(dec, arrays, processors=processors(0.25), temperature=0.8)
    dec.run(arrays, state)
    assert counted.traces(before) == []


def test_ends_of_each_row():
    """A row ends at its own EOS ids, and the others go on."""
    dec, arrays = toys.decoder("draft 3", "match"), toys.params("draft 3")
    whole = toys.naive_greedy(toys.PROMPTS, toys.LENGTHS, toys.LIMITS, eos=())
    ends = [[], [whole[1][8]], [whole[2][9], whole[2][20]], [toys.EOS]]
    texts = toys.texts(dec.run(arrays, toys.prefill(dec, arrays, eos=eos_of_rows(ends))))
    for text, full, length, end in zip(texts, whole, toys.LENGTHS, ends, strict=True):
        at = next((n for n in range(length, len(full)) if full[n] in end), len(full))
        assert text == full[: at + 1]


JOINT = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": {1: 0.7, 4: 0.5},
    "bad_words": [[3, 1], [2, 0, 2]],
    "min_new_tokens": 1,
}
END = 4


@functools.cache
def joint():
    """[VOCAB] * NEW: the joint distribution of texts that END may end, then 0, by reading every
    text plainly."""
    shape = (distribution.VOCAB,) * distribution.NEW
    prompt, chances = list(distribution.PROMPT), np.zeros(shape)
    every = np.array(list(np.ndindex(shape)))
    logits = toys.plain_logits(
        [prompt + new.tolist() for new in every], distribution.NET, distribution.weights()
    )
    for new, rows in zip(every.tolist(), logits, strict=True):
        chance = 1.0
        for n, token in enumerate(new):
            text = prompt + new[:n]
            x = reference(
                rows[len(text) - 1], text, len(prompt), [END], JOINT, no_repeated_pair_reference
            )
            chance *= float(jax.nn.softmax(jnp.asarray(x))[token])
        end = new.index(END) + 1 if END in new else len(new)
        chances[tuple(new[:end] + [0] * (len(new) - end))] += chance
    assert abs(chances.sum() - 1) < 1e-5 and (chances > 0).sum() >= 20
    return chances / chances.sum()


@pytest.mark.parametrize("case", ["draft", "tree"])
def test_samples_follow_the_target(case):
    """Chi-square test under rejection with every processor on, over texts that end early or not."""
    proposer, params = distribution.CASES[case]
    rows, start = distribution.EACH, len(distribution.PROMPT)
    dec = Decoder(
        distribution.NET, proposer, Rejection(), (END,), distribution.CAPACITY, no_repeated_pair
    )
    arrays = Params(distribution.weights(), params())
    state = dec.run(arrays, dec.prefill(
        arrays,
        jnp.tile(jnp.array(distribution.PROMPT), (rows, 1)),
        jnp.full(rows, start),
        limit=jnp.full(rows, distribution.CAPACITY),
        sampling=Sampling.create(rows),
        key=toys.keys(rows, seed=23),
        processors=Processors.create(rows, distribution.VOCAB, **JOINT),
    ))  # fmt: skip
    sample = np.asarray(state.tokens)[:, start : distribution.CAPACITY]
    sample = np.where(
        np.arange(start, distribution.CAPACITY) < np.asarray(state.length)[:, None], sample, 0
    )
    assert distribution.chi_square(sample, joint()) > distribution.IMPLAUSIBLE
    assert state.stats.accepted.sum() > 0.1 * state.stats.tested.sum()
