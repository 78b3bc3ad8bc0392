"""The laws of decoding for every proposer and rule: a proposal changes the speed, never the text.

A subclass names the toys and the pairs of a case and a rule.  All laws of a pair share its
programs, and run in one worker.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from toys import Toys

from specjax import RULES, Adaptive
from specjax.decoding import stats as metrics

SHARED = [name for name, rule in RULES.items() if rule.shared_noise and rule.exact]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """For a module with a subclass of `Laws`: its pairs are the cases of every law."""
    laws = metafunc.cls
    if laws is None or not issubclass(laws, Laws) or "case" not in metafunc.fixturenames:
        return
    pairs, law = laws.PAIRS, metafunc.function.__name__
    if "same_key" in law:
        pairs = laws.SAME_KEY
    elif "inserted" in law:
        pairs = laws.INSERTED
    elif "row_alone" in law:
        pairs = laws.ALONE
    group = "{}-{}-{}".format(laws.__name__, *("{}", "{}"))
    metafunc.parametrize(
        ("case", "rule"),
        [
            pytest.param(case, rule, marks=pytest.mark.xdist_group(group.format(case, rule)))
            for case, rule in pairs
        ],
    )


FILTERED = {
    "temperature": [0.7, 1.3, 0.0, 1.0],
    "top_k": [0, 9, 3, 0],
    "top_p": [0.9, 1, 1, 0.8],
    "min_p": [0, 0, 0, 0.05],
}


def run(toys: Toys, case: str, rule: str, **changes):
    dec, arrays = toys.decoder(case, rule), toys.params(case)
    return dec.run(arrays, toys.prefill(dec, arrays, **changes))


@functools.cache
def naive(toys: Toys):
    return toys.naive_greedy(toys.PROMPTS, toys.LENGTHS, toys.LIMITS)


@functools.cache
def single_tokens(toys: Toys, prompts):
    prompts = np.frombuffer(prompts, np.int32).reshape(toys.PROMPTS.shape)
    return toys.naive_greedy(prompts, np.ones(toys.ROWS, np.int32), np.full(toys.ROWS, 12))


@functools.cache
def plain_filtered(toys: Toys, rule):
    return toys.texts(run(toys, "none", rule, **FILTERED))


@functools.cache
def read_plainly(toys: Toys, tokens):
    tokens = np.frombuffer(tokens, np.int32).reshape(toys.ROWS, toys.CAPACITY)
    positions = np.broadcast_to(np.arange(toys.CAPACITY), tokens.shape)
    net = toys.model()
    cache = net.init_cache(toys.ROWS, toys.CAPACITY)
    return jax.device_get(jax.jit(net.apply)(toys.weights(), tokens, positions, cache).cache)


@functools.cache
def full(toys: Toys):
    return toys.naive_greedy(toys.PROMPTS, toys.LENGTHS, np.full(toys.ROWS, toys.CAPACITY))


class Laws:
    """The laws of one set of toys."""

    toys: Toys
    PAIRS: list[tuple[str, str]]  # a case and a rule
    INSERTED: list[tuple[str, str]]  # of these, the pairs whose prefill is compiled for one row
    ALONE: list[tuple[str, str]]  # of these, the pairs whose steps are compiled for one row too
    SAME_KEY: list[tuple[str, str]]  # pairs under rules that share their noise and are exact

    def test_greedy_speculation_is_greedy_decoding(self, case, rule):
        """Greedy texts of ragged prompts equal those of a decoder without a cache."""
        texts, state = self.toys.decoded(case, rule)
        assert texts == naive(self.toys)
        # The prompts cover EOS, limits, and drafts both accepted and rejected.
        assert [text[-1] == self.toys.EOS for text in texts] == [False, False, False, True]
        assert [len(text) for text in texts[:3]] == self.toys.LIMITS[:3].tolist()
        if state.stats.proposed.sum():
            assert 0 < state.stats.accepted.sum() < state.stats.tested.sum()

    def test_greedy_from_a_single_token(self, case, rule):
        """A prompt of one token has nothing to read before the first step."""
        prompts = np.zeros_like(self.toys.PROMPTS)
        prompts[:, 0] = [11, 1, 9, 7]
        lengths, limits = np.ones(self.toys.ROWS, np.int32), np.full(self.toys.ROWS, 12, np.int32)
        state = run(self.toys, case, rule, prompt=prompts, prompt_length=lengths, limit=limits)
        assert self.toys.texts(state) == single_tokens(self.toys, prompts.tobytes())

    def test_same_key_same_tokens(self, case, rule):
        """At temperature 1 with shared noise, the text does not depend on proposer, num_drafts or
        tree."""
        texts, state = self.toys.decoded(case, rule, 1.0)
        assert texts == self.toys.decoded("none", rule, 1.0)[0]
        assert texts != naive(self.toys)
        if state.stats.proposed.sum():
            assert 0 < state.stats.accepted.sum() < state.stats.tested.sum()

    def test_same_key_same_tokens_under_filters(self, case, rule):
        """This also holds if every row has its own temperature and filters; the greedy row stays
        greedy."""
        texts = self.toys.texts(run(self.toys, case, rule, **FILTERED))
        assert texts == plain_filtered(self.toys, rule)
        assert texts[2] == naive(self.toys)[2]

    def test_a_greedy_row_of_a_sampled_batch_is_greedy(self, case, rule):
        """Settings belong to a row."""
        texts = self.toys.texts(run(self.toys, case, rule, temperature=[1.0, 0.0, 1.5, 0.0]))
        assert [texts[1], texts[3]] == [naive(self.toys)[1], naive(self.toys)[3]]
        assert texts[0] == self.toys.decoded(case, rule, 1.0)[0][0]

    def test_keys_decide(self, case, rule):
        """Other keys give other texts, and the same keys the same texts."""
        again = self.toys.texts(run(self.toys, case, rule, temperature=1.0))
        assert again == self.toys.decoded(case, rule, 1.0)[0]
        others = self.toys.texts(
            run(self.toys, case, rule, temperature=1.0, key=self.toys.keys(seed=4))
        )
        assert all(x != y for x, y in zip(again, others, strict=True))

    def test_the_order_of_rows_does_not_matter(self, case, rule):
        """A permuted batch gives the permuted texts, also when sampled."""
        order = [2, 0, 3, 1]
        texts = self.toys.decoded(case, rule, 1.0)[0]
        assert self.toys.texts(run(self.toys, case, rule, rows=order, temperature=1.0)) == [
            texts[row] for row in order
        ]

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_row_alone_is_that_row_in_a_batch(self, case, rule, temperature):
        """The text of a row does not depend on the rows beside it."""
        for row in range(self.toys.ROWS):
            alone = run(self.toys, case, rule, rows=[row], temperature=temperature)
            assert (
                self.toys.texts(alone)
                == self.toys.decoded(case, rule, temperature)[0][row : row + 1]
            )

    def test_an_inserted_row_is_that_row_alone(self, case, rule):
        """A row inserted into a running batch decodes as alone, and the others go on unchanged."""
        dec, arrays = self.toys.decoder(case, rule), self.toys.params(case)
        state = dec.run(arrays, self.toys.prefill(dec, arrays, temperature=1.0), 2)
        assert not state.done.all()
        state = dec.insert(state, 1, self.toys.prefill(dec, arrays, rows=[2], temperature=1.0))
        state = dec.run(arrays, state)
        texts, alone = self.toys.decoded(case, rule, 1.0)
        assert self.toys.texts(state) == [texts[0], texts[2], texts[2], texts[3]]
        fields = ["emitted"]
        # What an adaptive proposer drafts for fixed texts follows the whole batch.
        if not (isinstance(dec.proposer, Adaptive) and dec.rule.fixes_text()):
            fields += ["target_passes", "accepted", "tested", "proposed"]
        for field in fields:
            assert getattr(state.stats, field)[1] == getattr(alone.stats, field)[2]

    def test_a_row_inserted_into_an_idle_batch(self, case, rule):
        """A finished batch decodes an inserted row, and its finished rows stay as they were."""
        dec, arrays = self.toys.decoder(case, rule), self.toys.params(case)
        state = dec.run(arrays, self.toys.prefill(dec, arrays))
        before = self.toys.texts(state)
        state = dec.insert(state, 3, self.toys.prefill(dec, arrays, rows=[0]))
        state = dec.run(arrays, state)
        assert self.toys.texts(state) == [*before[:3], naive(self.toys)[0]]

    def test_a_step_commits_what_it_emits(self, case, rule):
        """After each step the cache holds all but the pending token; only live rows grow, by 1 to D
        + 1."""
        dec, arrays = self.toys.decoder(case, rule), self.toys.params(case)
        state = self.toys.prefill(dec, arrays, temperature=[0.0, 1.0, 0.0, 1.0])
        np.testing.assert_array_equal(state.cache.length, state.length - 1)
        for _ in range(12):
            old = jax.device_get((state.length, state.done, state.tokens))
            state = dec.run(arrays, state, 1)
            length, done, tokens = old
            grown = np.asarray(state.length) - length
            np.testing.assert_array_equal(state.cache.length, state.length - 1)
            assert (grown[done] == 0).all()
            assert (grown[~done] >= 1).all()
            assert (grown <= dec.proposer.max_depth + 1).all()
            for row in range(self.toys.ROWS):
                np.testing.assert_array_equal(
                    state.tokens[row, : length[row]], tokens[row, : length[row]]
                )

    def test_the_cache_after_a_run_is_the_text_read_plainly(self, case, rule):
        """Committed keys and values are those of one pass over the final text."""
        texts, state = self.toys.decoded(case, rule)
        padded = np.zeros((self.toys.ROWS, self.toys.CAPACITY), np.int32)
        for row, text in zip(padded, texts, strict=True):
            row[: len(text)] = text
        plain = read_plainly(self.toys, padded.tobytes())
        for row in range(self.toys.ROWS):
            wanted = self.toys.committed(plain.replace(length=state.cache.length), row)
            for actual, want in zip(self.toys.committed(state.cache, row), wanted, strict=True):
                np.testing.assert_allclose(actual, want, rtol=0, atol=2e-5 * np.abs(want).max())

    def test_the_whole_capacity_can_be_used(self, case, rule):
        """Rows that fill their buffers to the last slot are exact, though the last blocks reach
        beyond it."""
        state = run(
            self.toys, case, rule, limit=np.full(self.toys.ROWS, self.toys.CAPACITY, np.int32)
        )
        assert self.toys.texts(state) == full(self.toys)
        assert [len(text) for text in full(self.toys)].count(self.toys.CAPACITY) >= 2

    def test_rows_that_are_done_at_the_start_stay_as_they_are(self, case, rule):
        """If the limits are already reached, there is no step, no token, and all figures are 0."""
        limits = self.toys.LENGTHS - np.array([0, 1, 0, 1], np.int32)
        state = run(self.toys, case, rule, limit=limits)
        assert self.toys.texts(state) == [
            p[:n].tolist() for p, n in zip(self.toys.PROMPTS, self.toys.LENGTHS, strict=True)
        ]
        assert all((leaf == 0).all() for leaf in jax.tree.leaves(state.stats))

    def test_figures_add_up(self, case, rule):
        """Emitted tokens are the new ones; a pass emits one more than it accepts, except for a cut
        at the end."""
        texts, state = self.toys.decoded(case, rule, 1.0)
        stats = state.stats
        assert stats.emitted.tolist() == [
            len(text) - n for text, n in zip(texts, self.toys.LENGTHS, strict=True)
        ]
        lost = stats.accepted + stats.target_passes - stats.emitted
        assert ((lost == 0) | (lost == 1)).all()
        assert (stats.accepted <= stats.tested).all()
        assert (stats.tested <= stats.proposed).all()
        if self.toys.CASES[case][0].max_depth == 0:
            assert metrics.acceptance_rate(stats) is None
            assert metrics.mean_accepted_length(stats) == 1

    def test_stream_equals_run(self, case, rule):
        """In chunks of three steps the text is the same, and tokens once streamed stay."""
        dec, arrays = self.toys.decoder(case, rule), self.toys.params(case)
        texts = self.toys.decoded(case, rule, 1.0)[0]
        seen, passes = None, 0
        for state in dec.stream(
            arrays, self.toys.prefill(dec, arrays, temperature=1.0), steps_per_chunk=3
        ):
            seen = self.toys.texts(state)
            assert all(text[: len(part)] == part for text, part in zip(texts, seen, strict=True))
            assert int(state.stats.target_passes.max()) - passes <= 3
            passes = int(state.stats.target_passes.max())
        assert seen == texts
