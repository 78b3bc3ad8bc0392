"""The laws of decoding under matchers on the host: texts are those of plain decoding with masks by
hand, follow the constrained distribution, and faults are caught.  No package is needed.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import constrained_toys as constrained
import jax
import numpy as np
import pytest
from distributions import CAPACITY as SHORT
from distributions import EACH, IMPLAUSIBLE, PROMPT, VOCAB, Distributions, chi_square, probabilities
from nested import Nested, follows
from over import over
from toys import Toys

from specjax import RULES, Processors
from specjax._internal.bit_masks import FREE
from specjax.constraints import Matchers
from specjax.decoding.decoder import Decoder
from specjax.decoding.host_grammar import Guided

CLOSE = {0: 2, 1: 3}
LEAST = [0, 0, 9, 0]
AUTOMATA = [None, constrained.SPECS[1], None, None]
NESTED = [False, False, True, True]
"""The first row is free, the second has an automaton, and the others have matchers."""


def guided(toys: Toys, case: str, rule: str, kind: type[Guided] = Guided) -> Guided:
    dec = Decoder(toys.model(), toys.CASES[case][0], RULES[rule](), (toys.EOS,), toys.CAPACITY)
    begin = functools.partial(Nested, toys.VOCAB, CLOSE, toys.EOS)
    return kind(dec, [begin if one else None for one in NESTED], toys.LENGTHS)


def processors() -> Processors:
    automata = [None if spec is None else constrained.automaton(spec) for spec in AUTOMATA]
    return Processors.create(Toys.ROWS, Toys.VOCAB, constraint=automata, min_new_tokens=LEAST)


def decode(
    toys: Toys,
    case: str,
    rule: str,
    temperature: float = 0.0,
    steps: tuple[int, ...] = (2**31 - 1,),
) -> tuple[list[list[int]], Any]:
    runner, arrays = guided(toys, case, rule), toys.params(case)
    state = toys.prefill(runner, arrays, temperature=temperature, processors=processors())
    for count in steps:
        state = runner.run(arrays, state, count)
    return toys.texts(state), jax.device_get(state.replace(key=None))


decoded = functools.cache(decode)


def process(row: int, text: list[int], logits: Any) -> np.ndarray:
    """The reference: the logits of a row after a text."""
    if not NESTED[row]:
        return constrained.process(row, text, logits, AUTOMATA, LEAST)
    output = text[Toys.LENGTHS[row] :]
    may, complete = follows(output, Toys.VOCAB, CLOSE, Toys.EOS)
    kept = [*may, *([Toys.EOS] if complete and len(output) >= LEAST[row] else [])]
    masked = np.full_like(logits, -np.inf)
    masked[kept] = logits[kept]
    return masked


def outputs(texts: list[list[int]]) -> list[list[int]]:
    return [text[length:] for text, length in zip(texts, Toys.LENGTHS, strict=True)]


@functools.cache
def naive(toys: Toys) -> list[list[int]]:
    return toys.naive_greedy(toys.PROMPTS, toys.LENGTHS, toys.LIMITS, process=process)


def fits(row: int, output: list[int]) -> bool:
    """Whether each token is one that may follow those before it."""
    if not NESTED[row]:
        return constrained.valid(AUTOMATA[row], output)
    for n, token in enumerate(output):
        may, complete = follows(output[:n], Toys.VOCAB, CLOSE, Toys.EOS)
        if token not in may and not (token == Toys.EOS and complete):
            return False
    return True


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


FAULTS = {"one mask for all nodes": flat, "the root unmasked": unmasked, "a token late": Late}
"""Planted faults."""

SMALL, END = {0: 1}, 4


@functools.cache
def joint(toys: Toys) -> np.ndarray:
    """[VOCAB] * NEW: the joint distribution of texts."""

    def follow(new: list[int], logits: np.ndarray) -> np.ndarray:
        may, complete = follows(new, VOCAB, SMALL, END)
        kept = sorted(may | ({END} if complete else set()))
        masked = np.full(VOCAB, -np.inf)
        masked[kept] = logits[kept]
        return probabilities(masked)

    made = Distributions(toys).joint(follow, END)
    assert (made > 0).sum() >= 8
    return made


class GuidedLaws:
    """The laws of one set of toys."""

    toys: Toys
    PAIRS: ClassVar[list[tuple[str, str]]]
    CHAIN: str

    @over("PAIRS")
    def test_greedy_speculation_is_greedy_decoding(self, case, rule):
        """The tokens are those of decoding without a cache, with masks in plain Python."""
        texts, state = decoded(self.toys, case, rule)
        assert texts == naive(self.toys)
        if case != "none":
            assert state.stats.accepted[2:].sum() > 0

    @over("PAIRS")
    def test_sampled_texts(self, case, rule):
        """They fit, and with `match` every proposer gives the text of plain decoding."""
        texts, _ = decoded(self.toys, case, rule, 1.0)
        made = outputs(texts)
        assert all(fits(row, output) for row, output in enumerate(made))
        assert texts != naive(self.toys) and len(made[2]) >= LEAST[2]
        if rule == "match":
            assert texts == decoded(self.toys, "none", rule, 1.0)[0]

    def test_the_language_is_worth_testing(self):
        """Brackets of both kinds nest, and a text ends."""
        toys = self.toys
        made = [*outputs(naive(toys)), *outputs(decoded(toys, "none", "match", 1.0)[0])]
        deep = [max(np.cumsum([(t in CLOSE) - (t in CLOSE.values()) for t in one])) for one in made]
        assert max(deep) >= 2
        assert any(set(CLOSE.values()) & set(one) for one in made[2:4])
        assert made[2:4] != outputs(toys.naive_greedy(toys.PROMPTS, toys.LENGTHS, toys.LIMITS))[2:]

    def test_matchers_follow_from_the_text(self):
        """A run that is left after two steps goes on as if it had not been."""
        again = decode(self.toys, self.CHAIN, "match", 1.0, (2, 1, 100))[0]
        assert again == decoded(self.toys, self.CHAIN, "match", 1.0)[0]

    def test_a_stream_is_a_run_and_rows_can_be_stopped(self):
        toys = self.toys
        runner, arrays = guided(toys, self.CHAIN, "match"), toys.params(self.CHAIN)
        states = runner.stream(arrays, toys.prefill(runner, arrays, processors=processors()), 1)
        next(states)
        states.send(np.arange(toys.ROWS) == 2)
        *_, last = states
        texts, whole = toys.texts(last), decoded(toys, self.CHAIN, "match")[0]
        assert texts[3] == whole[3] and len(texts[2]) < len(whole[2])

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("fault", FAULTS)
    def test_deliberate_faults_are_caught(self, fault, temperature, monkeypatch):
        """Another text, or one that the matcher refuses."""
        toys, planted = self.toys, FAULTS[fault]
        if planted is not Late:
            monkeypatch.setattr(Matchers, "tree", planted)
        kind = Late if planted is Late else Guided
        runner, arrays = guided(toys, self.CHAIN, "match", kind), toys.params(self.CHAIN)
        state = toys.prefill(runner, arrays, temperature=temperature, processors=processors())
        try:
            texts = toys.texts(runner.run(arrays, state))
        except ValueError as error:
            assert "may not follow the text of prompt" in str(error)
        else:
            assert texts != decoded(toys, "none", "match", temperature)[0]

    def check_samples(self, proposer: Any, params: Any, rule: str) -> None:
        """Chi-square test over all texts."""
        own, rows = Distributions(self.toys), EACH // 2
        dec = Decoder(own.net(), proposer, RULES[rule](), (END,), SHORT)
        begin = functools.partial(Nested, VOCAB, SMALL, END)
        runner = Guided(dec, [begin] * rows, np.full(rows, len(PROMPT)))
        sample, stats = own.sample(runner, params, 31, {}, rows)
        assert chi_square(sample, joint(self.toys)) > IMPLAUSIBLE
        assert stats.accepted.sum() > 0.05 * stats.tested.sum()
