"""The laws of decoding with every processor on; and log-probabilities.

All settings and a user's function are on at once, so that each pair is compiled only once.  A
subclass names the toys and the pairs of a case and a rule.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distributions import CAPACITY as SHORT
from distributions import EACH, IMPLAUSIBLE, NEW, PROMPT, VOCAB, Distributions, chi_square
from over import over
from reference import OFF, no_repeated_pair, no_repeated_pair_reference, reference
from toys import Toys

from specjax import RULES, Decoder, Params, Processors
from specjax.decoding import stats as metrics
from specjax.methods import DraftSource
from specjax.proposers import Chain

WORDS = [[4], [18, 11], [25, 21, 24], [1, 2, 3, 4, 5, 6, 7]]
SETTINGS: list[dict[str, Any]] = [
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
        "logit_bias": {Toys.EOS: 4.0},
        "min_new_tokens": 9,
    },
]
OTHERS = [[5], [9, 12], [2, 24, 21], [7, 6, 5, 4, 3, 2, 1]]
TOP = 2


def processors(shift: float = 0.0) -> Processors:
    """Settings that differ per row; `shift` changes the numbers."""
    rows = [OFF | row for row in SETTINGS]
    settings = {name: [row[name] for row in rows] for name in OFF if name != "bad_words"}
    settings["presence_penalty"] = [value + shift for value in settings["presence_penalty"]]
    return Processors.create(
        Toys.ROWS, Toys.VOCAB, bad_words=OTHERS if shift else WORDS, **settings
    )


def process(row: int, text: list[int], logits: Any, without: str = "") -> np.ndarray:
    """The reference, with the settings of a row, but for one of them."""
    settings = {k: v for k, v in (SETTINGS[row] | {"bad_words": WORDS}).items() if k != without}
    own = None if without == "function" else no_repeated_pair_reference
    return reference(logits, text, Toys.LENGTHS[row], [Toys.EOS], settings, own)


@functools.cache
def naive(toys: Toys, without: str = "") -> list[list[int]]:
    own = functools.partial(process, without=without)
    return toys.naive_greedy(toys.PROMPTS, toys.LENGTHS, toys.LIMITS, process=own)


def decoder(toys: Toys, proposer: Any, rule: str, kind: type[Decoder] = Decoder) -> Decoder:
    return kind(
        toys.model(), proposer, RULES[rule](), (toys.EOS,), toys.CAPACITY, no_repeated_pair, TOP
    )


def run(toys: Toys, dec: Decoder, arrays: Params, shift: float = 0.0, **changes: Any) -> Any:
    return dec.run(arrays, toys.prefill(dec, arrays, processors=processors(shift), **changes))


@functools.cache
def decoded(toys: Toys, case: str, rule: str, temperature: float = 0.0) -> Any:
    dec = decoder(toys, toys.CASES[case][0], rule)
    state = run(toys, dec, toys.params(case), temperature=temperature)
    return toys.texts(state), jax.device_get(state.replace(key=None))


def log_softmax(logits: Any) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    best = logits.max(-1, keepdims=True)
    return logits - best - np.log(np.exp(logits - best).sum(-1, keepdims=True))


@dataclasses.dataclass(frozen=True)
class Blind(Chain):
    """Warps as if every draft were a child of the root."""

    def propose(self, params: Any, state: Any, context: Any) -> Any:
        blind = dataclasses.replace(context, warp=lambda logits, path: context.warp(logits))
        return super().propose(params, state, blind)


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


FAULTS = {"frozen during a block": Frozen, "on the bonus token only": BonusOnly}
"""Planted faults."""

JOINT: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": {1: 0.7, 4: 0.5},
    "bad_words": [[3, 1], [2, 0, 2]],
    "min_new_tokens": 1,
}
END = 4


@functools.cache
def joint(toys: Toys) -> np.ndarray:
    """[VOCAB] * NEW: the joint distribution of texts with the settings `JOINT`."""

    def follow(new: list[int], logits: np.ndarray) -> np.ndarray:
        text = [*PROMPT, *new]
        own = no_repeated_pair_reference
        return np.exp(log_softmax(reference(logits, text, len(PROMPT), [END], JOINT, own)))

    made = Distributions(toys).joint(follow, END)
    assert made.shape == (VOCAB,) * NEW and (made > 0).sum() >= 20
    return made


def perfect(toys: Toys) -> Params:
    """The target as its own draft."""
    return Params(toys.weights(), toys.weights())


class ProcessorLaws:
    """The laws of one set of toys.

    PAIRS are all that is decoded; SAME_KEY those under exact rules with shared noise; INSERTED
    those whose rows are compiled alone; PERFECT those of a draft model with the target's weights;
    BITS chains as wide as the passes of "none padded".
    """

    toys: Toys
    PAIRS: ClassVar[list[tuple[str, str]]]
    SAME_KEY: ClassVar[list[tuple[str, str]]]
    INSERTED: ClassVar[list[tuple[str, str]]]
    PERFECT: ClassVar[list[tuple[str, str]]]
    BITS: ClassVar[list[tuple[str, str]]]

    @over("PAIRS")
    def test_greedy_speculation_is_greedy_decoding(self, case, rule):
        """With every processor on and other settings per row, the tokens are those of decoding
        without a cache."""
        texts, state = decoded(self.toys, case, rule)
        assert texts == naive(self.toys)
        if case.startswith(("draft", "tree", "table")):
            assert 0 < state.stats.accepted.sum() < state.stats.tested.sum()

    @over("SAME_KEY")
    def test_same_key_same_tokens(self, case, rule):
        """At temperature 1 with shared noise, every proposer gives the text of plain decoding."""
        texts, _ = decoded(self.toys, case, rule, 1.0)
        assert texts == decoded(self.toys, "none", rule, 1.0)[0]
        assert texts != naive(self.toys)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @over("PAIRS")
    def test_log_probabilities_are_those_of_the_text_read_plainly(self, case, rule, temperature):
        """The log-probabilities of accepted, residual and bonus tokens, before and after the warp,
        and the best ones."""
        toys = self.toys
        texts, state = decoded(toys, case, rule, temperature)
        padded = np.array([text + [0] * (toys.CAPACITY - len(text)) for text in texts], np.int32)
        plain = toys.plain_logits(padded)
        for row, text in enumerate(texts):
            start = toys.LENGTHS[row]
            logprobs = state.logprobs.row(row, start, len(text) - start)
            assert logprobs.top.shape == (len(text) - start, TOP)
            for n, at in enumerate(range(start, len(text))):
                raw = log_softmax(plain[row, at - 1])
                warped = log_softmax(process(row, text[:at], plain[row, at - 1]))
                wanted = 0.0 if temperature == 0 else warped[text[at]]
                np.testing.assert_allclose(logprobs.raw[n], raw[text[at]], atol=1e-4)
                np.testing.assert_allclose(logprobs.warped[n], wanted, atol=1e-4)
                np.testing.assert_allclose(logprobs.top[n], np.sort(raw)[::-1][:TOP], atol=1e-4)
                np.testing.assert_allclose(raw[logprobs.top_ids[n]], logprobs.top[n], atol=1e-4)

    @over("BITS")
    def test_bit_exact_mode(self, case, rule):
        """A chain has the same bits as plain decoding of the same width, also its
        log-probabilities."""
        toys = self.toys
        (texts, chain), (plain, wide) = (
            decoded(toys, name, rule, 1.0) for name in (case, "none padded")
        )
        assert texts == plain
        for row, text in enumerate(texts):
            new = (row, toys.LENGTHS[row], len(text) - toys.LENGTHS[row])
            for actual, wanted in zip(
                *(jax.tree.leaves(s.logprobs.row(*new)) for s in (chain, wide)), strict=True
            ):
                assert actual.tobytes() == wanted.tobytes()

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @over("PERFECT")
    def test_a_perfect_draft_is_always_accepted(self, case, rule, temperature):
        """The draft warps its draws by the processors of their own path, so alpha = 1."""
        dec = decoder(self.toys, self.toys.CASES[case][0], rule)
        state = run(self.toys, dec, perfect(self.toys), temperature=temperature)
        assert metrics.acceptance_rate(state.stats) == 1

    @over("INSERTED")
    def test_an_inserted_row_is_that_row_alone(self, case, rule):
        """An inserted row brings its settings and what they remember."""
        toys = self.toys
        dec, arrays = decoder(toys, toys.CASES[case][0], rule), self.toys.params(case)

        def begun(**rows):
            return toys.prefill(dec, arrays, temperature=1.0, processors=processors(), **rows)

        state = dec.insert(dec.run(arrays, begun(), 2), 1, begun(rows=[0]))
        texts = decoded(toys, case, rule, 1.0)[0]
        assert toys.texts(dec.run(arrays, state)) == [texts[0], texts[0], *texts[2:]]

    def check_samples(self, proposer: Any, params: Any, rows: int = EACH) -> None:
        """Texts under rejection with every processor on, which end early or not, follow their
        joint distribution."""
        own = Distributions(self.toys)
        dec = Decoder(own.net(), proposer, RULES["rejection"](), (END,), SHORT, no_repeated_pair)
        made = Processors.create(rows, VOCAB, **JOINT)
        sample, stats = own.sample(dec, params, 23, {}, rows, processors=made)
        assert chi_square(sample, joint(self.toys)) > IMPLAUSIBLE
        assert stats.accepted.sum() > 0.1 * stats.tested.sum()


class ProcessorFaults:
    """What is wrong, or only slow; FAULTY is the case over which faults are planted."""

    toys: Toys
    FAULTY: str

    def test_a_proposer_without_paths_costs_acceptance_alone(self):
        """Exactness does not depend on the paths."""
        toys = self.toys
        dec = decoder(toys, Blind(DraftSource(toys.model(), toys.VOCAB), 2), "match")
        assert toys.texts(run(toys, dec, perfect(toys))) == naive(toys)
        state = run(toys, dec, perfect(toys), temperature=1.0)
        assert toys.texts(state) == decoded(toys, "none", "match", 1.0)[0]
        assert metrics.acceptance_rate(state.stats) < 1

    @pytest.mark.parametrize("fault", FAULTS)
    def test_deliberate_faults_are_caught(self, fault):
        """The greedy law fails for each."""
        toys, (proposer, _) = self.toys, self.toys.CASES[self.FAULTY]
        dec = decoder(toys, proposer, "match", FAULTS[fault])
        assert toys.texts(run(toys, dec, toys.params(self.FAULTY))) != naive(toys)
