"""The laws of decoding under constraints: texts are complete, equal plain constrained decoding, and
follow the constrained distribution.  A subclass names the toys and the pairs of a case and a rule.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import constrained_toys as constrained
import jax
import numpy as np
import pytest
from distributions import CAPACITY as SHORT
from distributions import EACH, IMPLAUSIBLE, NEW, VOCAB, Distributions, chi_square, probabilities
from over import over
from processor_laws import log_softmax
from toys import Toys

from specjax import RULES, Decoder, FirstOf, Forced, Params, Processors, Sampling, warp
from specjax.decoding import stats as metrics


def processors(specs: Any = None, **settings: Any) -> Processors:
    automata = [
        None if spec is None else constrained.automaton(spec) for spec in specs or constrained.SPECS
    ]
    return Processors.create(
        Toys.ROWS, Toys.VOCAB, constraint=automata,
        **({"min_new_tokens": constrained.LEAST} | settings),
    )  # fmt: skip


def case_of(toys: Toys, case: str) -> Any:
    """The toys' case; what comes after "forced, then" drafts where nothing is forced."""
    then = case.removeprefix("forced, then ")
    proposer, params = toys.CASES[then]
    return (proposer, params) if then == case else (FirstOf(Forced(3), proposer), (None, params))


def decoder(
    toys: Toys, case: str, rule: str, kind: type[Decoder] = Decoder, logprobs: int | None = None
) -> Decoder:
    proposer = case_of(toys, case)[0]
    return kind(toys.model(), proposer, RULES[rule](), (toys.EOS,), toys.CAPACITY, None, logprobs)


def params_of(toys: Toys, case: str) -> Params:
    return Params(toys.weights(), case_of(toys, case)[1])


def run(toys: Toys, dec: Decoder, arrays: Params, **changes: Any) -> Any:
    return dec.run(arrays, toys.prefill(dec, arrays, processors=processors(), **changes))


@functools.cache
def decoded(
    toys: Toys, case: str, rule: str, temperature: float = 0.0, logprobs: int | None = None
) -> Any:
    dec, arrays = decoder(toys, case, rule, logprobs=logprobs), params_of(toys, case)
    state = run(toys, dec, arrays, temperature=temperature)
    return toys.texts(state), jax.device_get(state.replace(key=None))


def outputs(texts: list[list[int]]) -> list[list[int]]:
    return [text[length:] for text, length in zip(texts, Toys.LENGTHS, strict=True)]


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


FAULTS = {
    "one mask for all nodes": Flat,
    "a token late": Late,
    "the root unmasked": Unmasked,
}
"""Planted faults."""

SPEC: constrained.Spec = ([{0: 1, 2: 1, 1: 2}, {1: 0, 3: 2, 0: 2}, {3: 2, 0: 0}], {1, 2})
END = 4
SETTINGS: dict[str, Any] = {"temperature": 1.2, "top_k": 3, "top_p": 0.95}


@functools.cache
def joint(toys: Toys) -> np.ndarray:
    """[VOCAB] * NEW: the joint distribution of constrained texts."""
    sampling, warped = Sampling.create(1, **SETTINGS), jax.jit(warp)

    def follow(new: list[int], logits: np.ndarray) -> np.ndarray:
        kept = constrained.allowed(SPEC, new, NEW - len(new), eos=END)
        masked = np.full(VOCAB, -np.inf, np.float32)
        masked[kept] = logits[kept]
        return probabilities(warped(masked[None, None], sampling))[0, 0]

    made = Distributions(toys).joint(follow, END)
    assert (made > 0).sum() >= 8
    return made


class ConstraintLaws:
    """The laws of one set of toys.

    PAIRS are all that is decoded, SAME_KEY those under exact rules with shared noise, LOGPROBS,
    INSERTED and PERFECT some of them; FAULTY is the case over which faults are planted.  Only the
    decoders of LOGPROBS record log-probabilities.
    """

    toys: Toys
    PAIRS: ClassVar[list[tuple[str, str]]]
    SAME_KEY: ClassVar[list[tuple[str, str]]]
    LOGPROBS: ClassVar[list[tuple[str, str]]]
    INSERTED: ClassVar[list[tuple[str, str]]]
    PERFECT: ClassVar[list[tuple[str, str]]]
    FAULTY = "draft 3"

    def recorded(self, case: str, rule: str) -> int | None:
        return 2 if (case, rule) in self.LOGPROBS else None

    def decoded(self, case: str, rule: str, temperature: float = 0.0) -> Any:
        return decoded(self.toys, case, rule, temperature, self.recorded(case, rule))

    def decoder(self, case: str, rule: str) -> Decoder:
        return decoder(self.toys, case, rule, logprobs=self.recorded(case, rule))

    def test_the_constraints_are_worth_testing(self):
        """Each changes its text, and a limit and the fewest tokens matter."""
        toys = self.toys
        free = toys.naive_greedy(toys.PROMPTS, toys.LENGTHS, toys.LIMITS)
        texts = constrained.naive(toys)
        assert texts[0] == free[0] and all(texts[row] != free[row] for row in (1, 2, 3))
        other = functools.partial(constrained.process, least=[0] * 4)
        assert texts != toys.naive_greedy(toys.PROMPTS, toys.LENGTHS, toys.LIMITS, process=other)
        assert any(text[-1] == toys.EOS for text in texts)
        assert any(text[-1] != toys.EOS for text in texts)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @over("PAIRS")
    def test_every_text_is_complete(self, case, rule, temperature):
        texts, _ = self.decoded(case, rule, temperature)
        for spec, output, least in zip(
            constrained.SPECS, outputs(texts), constrained.LEAST, strict=True
        ):
            assert constrained.valid(spec, output)
            assert len(output) >= least

    @over("PAIRS")
    def test_greedy_speculation_is_greedy_decoding(self, case, rule):
        """The tokens are those of decoding without a cache, with masks in plain Python."""
        texts, state = self.decoded(case, rule)
        assert texts == constrained.naive(self.toys)
        if case != "none":
            assert state.stats.accepted.sum() > 0

    @over("SAME_KEY")
    def test_same_key_same_tokens(self, case, rule):
        """At temperature 1 every proposer gives the text of plain constrained decoding."""
        texts, _ = self.decoded(case, rule, 1.0)
        assert texts == self.decoded("none", rule, 1.0)[0]
        assert texts != constrained.naive(self.toys)

    def test_forced_tokens_cost_no_pass(self):
        """They are accepted at every temperature, where they are the only way on."""
        plain, forced = (self.decoded(case, "match", 1.0)[1] for case in ("none", "forced"))
        assert metrics.acceptance_rate(forced.stats) == 1
        assert forced.stats.target_passes[1] < 0.7 * plain.stats.target_passes[1]
        assert forced.stats.proposed[0] == 0

    @over("LOGPROBS")
    def test_log_probabilities_are_those_of_the_text_read_plainly(self, case, rule):
        toys = self.toys
        texts, state = self.decoded(case, rule, 1.0)
        padded = np.array([text + [0] * (toys.CAPACITY - len(text)) for text in texts], np.int32)
        plain = toys.plain_logits(padded)
        for row, text in enumerate(texts):
            start = toys.LENGTHS[row]
            logprobs = state.logprobs.row(row, start, len(text) - start)
            for n, at in enumerate(range(start, len(text))):
                raw = log_softmax(plain[row, at - 1])
                warped = log_softmax(constrained.process(row, text[:at], plain[row, at - 1]))
                np.testing.assert_allclose(logprobs.raw[n], raw[text[at]], atol=1e-4)
                np.testing.assert_allclose(logprobs.warped[n], warped[text[at]], atol=1e-4)

    @over("PERFECT")
    def test_a_perfect_draft_is_always_accepted(self, case, rule):
        """The draft's distributions are masked by the state after its own path."""
        perfect = Params(self.toys.weights(), self.toys.weights())
        state = run(self.toys, self.decoder(case, rule), perfect, temperature=1.0)
        assert metrics.acceptance_rate(state.stats) == 1

    @over("INSERTED")
    def test_an_inserted_row_is_that_row_alone(self, case, rule):
        """An inserted row brings its automaton and its state; rows without one can be replaced
        too."""
        toys = self.toys
        dec, arrays = self.decoder(case, rule), params_of(toys, case)

        def begun(**rows):
            return toys.prefill(dec, arrays, temperature=1.0, processors=processors(), **rows)

        state = dec.insert(dec.run(arrays, begun(), 2), 0, begun(rows=[2]))
        state = dec.insert(state, 3, begun(rows=[0]))
        texts = self.decoded(case, rule, 1.0)[0]
        assert toys.texts(dec.run(arrays, state)) == [texts[2], texts[1], texts[2], texts[0]]

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("fault", FAULTS)
    def test_deliberate_faults_are_caught(self, fault, temperature):
        """Texts are neither complete nor those of plain decoding."""
        dec = decoder(self.toys, self.FAULTY, "match", FAULTS[fault])
        state = run(self.toys, dec, params_of(self.toys, self.FAULTY), temperature=temperature)
        texts = self.toys.texts(state)
        assert texts != self.decoded("none", "match", temperature)[0]
        assert not all(map(constrained.valid, constrained.SPECS, outputs(texts)))

    def check_samples(self, proposer: Any, params: Any, rule: str, rows: int = EACH) -> None:
        """Chi-square test over all texts, with top-k and top-p behind the mask."""
        own = Distributions(self.toys)
        dec = Decoder(own.net(), proposer, RULES[rule](), (END,), SHORT)
        automaton = constrained.automaton(SPEC, VOCAB)
        made = Processors.create(rows, VOCAB, constraint=automaton)
        table = made.automata  # of 256 states and 128 classes: half a gigabyte for 4000 rows
        made = made.replace(
            automata=table.replace(
                next=table.next[:, :4, :8], shortest=table.shortest[:, :4],
                longest=table.longest[:, :4], likely=table.likely[:, :4],
            )
        )  # fmt: skip
        sample, stats = own.sample(dec, params, 29, SETTINGS, rows, processors=made)
        assert chi_square(sample, joint(self.toys)) > IMPLAUSIBLE
        if not isinstance(proposer, Forced):
            assert stats.accepted.sum() > 0.1 * stats.tested.sum()
