"""The laws of decoding with a draft model that is perfect, whose whole blocks ends and limits cut.

A subclass names pairs of "draft 3" and a rule.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import numpy as np
from over import over
from toys import TABLES as toys

from specjax import RULES, Params, eos_of_rows
from specjax.decoding import stats as metrics

PERFECT = Params(toys.weights(), toys.weights())
GAMMA = 3  # num_drafts of "draft 3"


@functools.cache
def naive() -> list[list[int]]:
    return toys.naive_greedy(toys.PROMPTS, toys.LENGTHS, toys.LIMITS)


def run(case: str, rule: str, arrays: Any = None, **changes: Any) -> Any:
    dec, arrays = toys.decoder(case, rule), arrays or toys.params(case)
    return dec.run(arrays, toys.prefill(dec, arrays, **changes))


class DraftLaws:
    """The laws of some rules."""

    PAIRS: ClassVar[list[tuple[str, str]]]

    @over("PAIRS")
    def test_an_end_inside_a_block_ends_the_row(self, case, rule):
        """EOS anywhere in a block ends the row: nothing behind it is emitted, committed or
        counted."""
        text = naive()[3][:6]
        assert text[-1] not in text[1:-1]
        prompts = np.zeros_like(toys.PROMPTS)
        lengths = np.arange(1, 5, dtype=np.int32)
        for row, length in enumerate(lengths):
            prompts[row, :length] = text[:length]
        state = run(
            case,
            rule,
            PERFECT,
            prompt=prompts,
            prompt_length=lengths,
            limit=np.full(toys.ROWS, toys.CAPACITY),
            eos=eos_of_rows([[text[-1]]] * toys.ROWS),
        )
        assert toys.texts(state) == [text] * 4
        np.testing.assert_array_equal(state.cache.length, [5] * 4)
        assert state.stats.emitted.tolist() == [5, 4, 3, 2]
        assert state.stats.target_passes.tolist() == [2, 1, 1, 1]
        # Whole blocks are accepted: three drafts, then one up to the end.
        assert state.stats.accepted.tolist() == [4, 3, 3, 2]
        assert state.stats.tested.tolist() == [4, 3, 3, 2]

    @over("PAIRS")
    def test_a_limit_inside_a_block_cuts_it(self, case, rule):
        """A row stops exactly at its limit, whatever was accepted beyond it."""
        limits = toys.LENGTHS + np.array([1, 2, 3, 4], np.int32)
        state = run(case, rule, PERFECT, limit=limits)
        assert toys.texts(state) == [
            text[:limit] for text, limit in zip(naive(), limits, strict=True)
        ]
        np.testing.assert_array_equal(state.cache.length, limits - 1)
        assert state.stats.emitted.tolist() == [1, 2, 3, 4]
        assert state.stats.accepted.tolist() == state.stats.tested.tolist() == [1, 2, 3, 3]

    @over("PAIRS")
    def test_a_perfect_draft_is_always_accepted(self, case, rule):
        """alpha = 1 and tau = gamma + 1, also after full acceptance, when the draft must read one
        more token.

        The last row is padding, done from the start, and does not count.
        """
        limits = toys.LENGTHS + np.array([20, 12, 28, 0], np.int32)
        for temperature in (0.0, 1.0) if RULES[rule].exact else (0.0,):
            state = run(
                case,
                rule,
                PERFECT,
                temperature=temperature,
                limit=limits,
                eos=eos_of_rows([[]] * toys.ROWS),
            )
            assert state.length.tolist() == limits.tolist()
            assert state.stats.target_passes.tolist() == [5, 3, 7, 0]
            assert metrics.acceptance_rate(state.stats) == 1
            assert metrics.mean_accepted_length(state.stats) == GAMMA + 1

    @over("PAIRS")
    def test_stream_stops_rows_that_it_is_told_to(self, case, rule):
        """A stopped row stays as it is, and the others go on as before."""
        dec, arrays = toys.decoder(case, rule), toys.params(case)
        stream = dec.stream(arrays, toys.prefill(dec, arrays, temperature=1.0), steps_per_chunk=1)
        part = toys.texts(next(stream))
        state = stream.send(np.array([True, False, False, False]))
        while not state.done.all():
            state = next(stream)
        texts = toys.decoded(case, rule, 1.0)[0]
        assert toys.texts(state) == [part[0], *texts[1:]]
        assert len(part[0]) < len(texts[0])
