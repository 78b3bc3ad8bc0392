"""The laws of decoding for every proposer and rule: a proposal changes the speed, never the text.

Where a law needs a perfect draft, the target's own weights serve as the draft's.
"""

import functools

import jax
import numpy as np
import pytest
import toys

from specjax import PROPOSERS, RULES, Adaptive, metrics

RULED = {("tree", "typical"), ("tree", "threshold"), ("draft 3", "block")}
PAIRS = toys.covering(toys.PAIRS, toys.COVERING | RULED)
"""By default those of `toys.COVERING`, and every rule. `test_distribution.py` samples more."""
ALONE = toys.covering(toys.ALONE, toys.FEW)
SHARED = [name for name, rule in RULES.items() if rule.shared_noise and rule.exact]


@functools.cache
def naive():
    return toys.naive_greedy(toys.PROMPTS, toys.LENGTHS, toys.LIMITS)


def run(case, rule, arrays=None, **changes):
    dec, arrays = toys.decoder(case, rule), arrays or toys.params(case)
    return dec.run(arrays, toys.prefill(dec, arrays, **changes))


def test_every_proposer_has_a_case():
    """New proposers, and new shapes over a source, must be added to the cases, alone and in
    batches."""
    assert set(toys.TABLE) == set(PROPOSERS)
    alone = {case for case, _ in toys.ALONE}
    assert all(set(cases) & alone for cases in toys.TABLE.values())
    kinds = {case: toys.kind(proposer) for case, (proposer, _) in toys.CASES.items()}
    assert {kinds[case] for case in alone} >= toys.KINDS
    assert {(kinds[case], rule) for case, rule in toys.PAIRS} >= {
        (kind, rule) for kind in toys.KINDS for rule in toys.NOISE_KINDS
    }
    assert len([kind for kind in toys.KINDS if len(kind) == 2]) == 15


def test_the_default_pairs_cover():
    """`toys.COVERING` is a part of `toys.ALONE` with every shape, every source and every proposer
    that is neither, and with a chain and a tree under both kinds of noise."""
    assert set(toys.ALONE) >= toys.COVERING >= toys.FEW
    assert {rule for _, rule in toys.COVERING | RULED} == set(RULES)
    covered = {part for case, _ in toys.COVERING for part in toys.kind(toys.CASES[case][0])}
    assert covered >= {part for kind in toys.KINDS for part in kind}
    forms = {(rule, toys.CASES[case][0].is_chain) for case, rule in toys.COVERING}
    assert forms == {(rule, chain) for rule in toys.NOISE_KINDS for chain in (True, False)}


@pytest.mark.parametrize(("case", "rule"), PAIRS)
def test_greedy_speculation_is_greedy_decoding(case, rule):
    """Greedy texts of ragged prompts equal those of a decoder without a cache."""
    texts, state = toys.decoded(case, rule)
    assert texts == naive()
    # The prompts cover EOS, limits, and drafts both accepted and rejected.
    assert [text[-1] == toys.EOS for text in texts] == [False, False, False, True]
    assert [len(text) for text in texts[:3]] == toys.LIMITS[:3].tolist()
    if state.stats.proposed.sum():
        assert 0 < state.stats.accepted.sum() < state.stats.tested.sum()


@pytest.mark.parametrize(("case", "rule"), PAIRS)
def test_greedy_from_a_single_token(case, rule):
    """A prompt of one token has nothing to read before the first step."""
    prompts = np.zeros_like(toys.PROMPTS)
    prompts[:, 0] = [11, 1, 9, 7]
    lengths, limits = np.ones(toys.ROWS, np.int32), np.full(toys.ROWS, 12, np.int32)
    state = run(case, rule, prompt=prompts, prompt_length=lengths, limit=limits)
    assert toys.texts(state) == single_tokens(prompts.tobytes())


@functools.cache
def single_tokens(prompts):
    prompts = np.frombuffer(prompts, np.int32).reshape(toys.PROMPTS.shape)
    return toys.naive_greedy(prompts, np.ones(toys.ROWS, np.int32), np.full(toys.ROWS, 12))


@pytest.mark.parametrize("case", toys.CASES)
@pytest.mark.parametrize("rule", SHARED)
def test_same_key_same_tokens(case, rule):
    """At temperature 1 with shared noise, the text does not depend on proposer, num_drafts or
    tree."""
    texts, state = toys.decoded(case, rule, 1.0)
    assert texts == toys.decoded("none", rule, 1.0)[0]
    assert texts != naive()
    if state.stats.proposed.sum():
        assert 0 < state.stats.accepted.sum() < state.stats.tested.sum()


@functools.cache
def plain_filtered(rule):
    return toys.texts(run("none", rule, **FILTERED))


FILTERED = {
    "temperature": [0.7, 1.3, 0.0, 1.0],
    "top_k": [0, 9, 3, 0],
    "top_p": [0.9, 1, 1, 0.8],
    "min_p": [0, 0, 0, 0.05],
}


@pytest.mark.parametrize("case", toys.CASES)
@pytest.mark.parametrize("rule", SHARED)
def test_same_key_same_tokens_under_filters(case, rule):
    """This also holds if every row has its own temperature and filters; the greedy row stays
    greedy."""
    texts = toys.texts(run(case, rule, **FILTERED))
    assert texts == plain_filtered(rule)
    assert texts[2] == naive()[2]


@pytest.mark.parametrize(("case", "rule"), PAIRS)
def test_a_greedy_row_of_a_sampled_batch_is_greedy(case, rule):
    """Settings belong to a row."""
    texts = toys.texts(run(case, rule, temperature=[1.0, 0.0, 1.5, 0.0]))
    assert [texts[1], texts[3]] == [naive()[1], naive()[3]]
    assert texts[0] == toys.decoded(case, rule, 1.0)[0][0]


@pytest.mark.parametrize(("case", "rule"), PAIRS)
def test_keys_decide(case, rule):
    """Other keys give other texts, and the same keys the same texts."""
    again = toys.texts(run(case, rule, temperature=1.0))
    assert again == toys.decoded(case, rule, 1.0)[0]
    others = toys.texts(run(case, rule, temperature=1.0, key=toys.keys(seed=4)))
    assert all(x != y for x, y in zip(again, others, strict=True))


@pytest.mark.parametrize(("case", "rule"), PAIRS)
def test_the_order_of_rows_does_not_matter(case, rule):
    """A permuted batch gives the permuted texts, also when sampled."""
    order = [2, 0, 3, 1]
    texts = toys.decoded(case, rule, 1.0)[0]
    assert toys.texts(run(case, rule, rows=order, temperature=1.0)) == [texts[row] for row in order]


@pytest.mark.parametrize(("case", "rule"), ALONE)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_alone_is_that_row_in_a_batch(case, rule, temperature):
    """The text of a row does not depend on the rows beside it."""
    for row in range(toys.ROWS):
        alone = run(case, rule, rows=[row], temperature=temperature)
        assert toys.texts(alone) == toys.decoded(case, rule, temperature)[0][row : row + 1]


@pytest.mark.parametrize(("case", "rule"), ALONE)
def test_an_inserted_row_is_that_row_alone(case, rule):
    """A row inserted into a running batch decodes as alone, and the other rows go on unchanged."""
    dec, arrays = toys.decoder(case, rule), toys.params(case)
    state = dec.run(arrays, toys.prefill(dec, arrays, temperature=1.0), 2)
    assert not state.done.all()
    state = dec.insert(state, 1, toys.prefill(dec, arrays, rows=[2], temperature=1.0))
    state = dec.run(arrays, state)
    texts, alone = toys.decoded(case, rule, 1.0)
    assert toys.texts(state) == [texts[0], texts[2], texts[2], texts[3]]
    fields = ["emitted"]
    # What an adaptive proposer drafts for fixed texts follows the whole batch.
    if not (isinstance(dec.proposer, Adaptive) and dec.rule.fixes_text()):
        fields += ["target_passes", "accepted", "tested", "proposed"]
    for field in fields:
        assert getattr(state.stats, field)[1] == getattr(alone.stats, field)[2]


@pytest.mark.parametrize(("case", "rule"), ALONE)
def test_a_row_inserted_into_an_idle_batch(case, rule):
    """A finished batch decodes a newly inserted row, and its finished rows stay as they were."""
    dec, arrays = toys.decoder(case, rule), toys.params(case)
    state = dec.run(arrays, toys.prefill(dec, arrays))
    before = toys.texts(state)
    state = dec.insert(state, 3, toys.prefill(dec, arrays, rows=[0]))
    state = dec.run(arrays, state)
    assert toys.texts(state) == [*before[:3], naive()[0]]


@pytest.mark.parametrize(("case", "rule"), PAIRS)
def test_a_step_commits_what_it_emits(case, rule):
    """After each step the cache holds all but the pending token; only live rows grow, by 1 to D
    + 1."""
    dec, arrays = toys.decoder(case, rule), toys.params(case)
    state = toys.prefill(dec, arrays, temperature=[0.0, 1.0, 0.0, 1.0])
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
        for row in range(toys.ROWS):
            np.testing.assert_array_equal(
                state.tokens[row, : length[row]], tokens[row, : length[row]]
            )


@pytest.mark.parametrize(("case", "rule"), PAIRS)
def test_the_cache_after_a_run_is_the_text_read_plainly(case, rule):
    """Committed keys and values are those of one pass over the final text."""
    texts, state = toys.decoded(case, rule)
    padded = np.zeros((toys.ROWS, toys.CAPACITY), np.int32)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    plain = read_plainly(padded.tobytes())
    for row in range(toys.ROWS):
        wanted = toys.committed(plain.replace(length=state.cache.length), row)
        for actual, want in zip(toys.committed(state.cache, row), wanted, strict=True):
            np.testing.assert_allclose(actual, want, rtol=0, atol=2e-5 * np.abs(want).max())


@functools.cache
def read_plainly(tokens):
    tokens = np.frombuffer(tokens, np.int32).reshape(toys.ROWS, toys.CAPACITY)
    positions = np.broadcast_to(np.arange(toys.CAPACITY), tokens.shape)
    net = toys.model()
    cache = net.init_cache(toys.ROWS, toys.CAPACITY)
    return jax.device_get(jax.jit(net.apply)(toys.weights(), tokens, positions, cache).cache)


@pytest.mark.parametrize(("case", "rule"), PAIRS)
def test_the_whole_capacity_can_be_used(case, rule):
    """Rows that fill their buffers to the last slot are exact, though the last blocks reach
    beyond it."""
    state = run(case, rule, limit=np.full(toys.ROWS, toys.CAPACITY, np.int32))
    assert toys.texts(state) == full()
    assert [len(text) for text in full()[:3]] == [toys.CAPACITY] * 3


@functools.cache
def full():
    return toys.naive_greedy(toys.PROMPTS, toys.LENGTHS, np.full(toys.ROWS, toys.CAPACITY))


@pytest.mark.parametrize(("case", "rule"), PAIRS)
def test_rows_that_are_done_at_the_start_stay_as_they_are(case, rule):
    """If the limits are already reached, there is no step, no token, and all figures are 0."""
    limits = toys.LENGTHS - np.array([0, 1, 0, 1], np.int32)
    state = run(case, rule, limit=limits)
    assert toys.texts(state) == [
        p[:n].tolist() for p, n in zip(toys.PROMPTS, toys.LENGTHS, strict=True)
    ]
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(state.stats))


@pytest.mark.parametrize(("case", "rule"), PAIRS)
def test_figures_add_up(case, rule):
    """Emitted tokens are the new ones; a pass emits one more than it accepts, except for a cut
    at the end."""
    texts, state = toys.decoded(case, rule, 1.0)
    stats = state.stats
    assert stats.emitted.tolist() == [
        len(text) - n for text, n in zip(texts, toys.LENGTHS, strict=True)
    ]
    lost = stats.accepted + stats.target_passes - stats.emitted
    assert ((lost == 0) | (lost == 1)).all()
    assert (stats.accepted <= stats.tested).all()
    assert (stats.tested <= stats.proposed).all()
    if toys.CASES[case][0].max_depth == 0:
        assert metrics.acceptance_rate(stats) is None
        assert metrics.mean_accepted_length(stats) == 1


@pytest.mark.parametrize(("case", "rule"), PAIRS)
def test_stream_equals_run(case, rule):
    """In chunks of three steps the text is the same, and tokens once streamed stay."""
    dec, arrays = toys.decoder(case, rule), toys.params(case)
    texts = toys.decoded(case, rule, 1.0)[0]
    seen, passes = None, 0
    for state in dec.stream(arrays, toys.prefill(dec, arrays, temperature=1.0), steps_per_chunk=3):
        seen = toys.texts(state)
        assert all(text[: len(part)] == part for text, part in zip(texts, seen, strict=True))
        assert int(state.stats.target_passes.max()) - passes <= 3
        passes = int(state.stats.target_passes.max())
    assert seen == texts
