"""The laws of decoding with draft models that are perfect or differ from the target in vocabulary.

Perfect drafts fill whole blocks, so that ends and limits cut them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trees
from toys import TABLES as toys

from specjax import RULES, Decoder, DraftModel, Params, eos_of_rows, metrics

PERFECT = Params(toys.weights(), toys.weights())
GAMMA = 3  # num_drafts of "draft 3"


@functools.cache
def naive():
    return toys.naive_greedy(toys.PROMPTS, toys.LENGTHS, toys.LIMITS)


def run(case, rule, arrays=None, **changes):
    dec, arrays = toys.decoder(case, rule), arrays or toys.params(case)
    return dec.run(arrays, toys.prefill(dec, arrays, **changes))


@pytest.mark.parametrize("rule", RULES)
def test_an_end_inside_a_block_ends_the_row(rule):
    """EOS anywhere in a block ends the row: nothing behind it is emitted, committed or counted."""
    text = naive()[3][:6]
    assert text[-1] not in text[1:-1]
    prompts = np.zeros_like(toys.PROMPTS)
    lengths = np.arange(1, 5, dtype=np.int32)
    for row, length in enumerate(lengths):
        prompts[row, :length] = text[:length]
    state = run(
        "draft 3",
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


@pytest.mark.parametrize("rule", RULES)
def test_a_limit_inside_a_block_cuts_it(rule):
    """A row stops exactly at its limit, whatever was accepted beyond it."""
    limits = toys.LENGTHS + np.array([1, 2, 3, 4], np.int32)
    state = run("draft 3", rule, PERFECT, limit=limits)
    assert toys.texts(state) == [text[:limit] for text, limit in zip(naive(), limits, strict=True)]
    np.testing.assert_array_equal(state.cache.length, limits - 1)
    assert state.stats.emitted.tolist() == [1, 2, 3, 4]
    assert state.stats.accepted.tolist() == state.stats.tested.tolist() == [1, 2, 3, 3]


@pytest.mark.parametrize(
    ("rule", "temperature"),
    [(name, t) for name, rule in RULES.items() for t in (0.0, 1.0) if rule.exact or t == 0],
)
def test_a_perfect_draft_is_always_accepted(rule, temperature):
    """alpha = 1 and tau = gamma + 1, also after full acceptance, when the draft must read one more
    token.

    The last row is padding, done from the start, and does not count.
    """
    limits = toys.LENGTHS + np.array([20, 12, 28, 0], np.int32)
    state = run(
        "draft 3",
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


@pytest.mark.parametrize("rule", RULES)
def test_stream_stops_rows_that_it_is_told_to(rule):
    """A stopped row stays as it is, and the others go on as before."""
    dec, arrays = toys.decoder("draft 3", rule), toys.params("draft 3")
    stream = dec.stream(arrays, toys.prefill(dec, arrays, temperature=1.0), steps_per_chunk=1)
    part = toys.texts(next(stream))
    state = stream.send(np.array([True, False, False, False]))
    while not state.done.all():
        state = next(stream)
    texts = toys.decoded("draft 3", rule, 1.0)[0]
    assert toys.texts(state) == [part[0], *texts[1:]]
    assert len(part[0]) < len(texts[0])


@pytest.mark.parametrize(
    ("rule", "size"), [("rejection", toys.VOCAB - 5), ("match", toys.VOCAB + 6)]
)
def test_a_draft_may_have_another_padded_vocabulary(rule, size):
    """Neither a smaller nor a larger draft vocabulary changes the text."""
    proposer = DraftModel(toys.model(size, num_layers=1), toys.VOCAB, 2)
    dec = Decoder(toys.model(), proposer, RULES[rule](), (toys.EOS,), toys.CAPACITY)
    arrays = Params(toys.weights(), toys.revocabulated(size))
    state = dec.run(arrays, toys.prefill(dec, arrays))
    assert toys.texts(state) == naive()
    assert 0 < state.stats.accepted.sum() < state.stats.tested.sum()
    assert max(map(max, naive())) >= toys.VOCAB - 5
    state = dec.run(arrays, toys.prefill(dec, arrays, temperature=1.0))
    assert max(map(max, toys.texts(state))) < toys.VOCAB
    if RULES[rule].shared_noise:
        assert toys.texts(state) == toys.decoded("none", rule, 1.0)[0]


def test_a_step_tells_what_it_did():
    """StepInfo describes the emission; on a tree, paths leave the first branch and the state
    follows them."""
    rule = "rejection"
    dec, arrays = toys.decoder("tree", rule), toys.params("tree")
    step = jax.jit(dec.step)
    state = toys.prefill(dec, arrays, temperature=1.0)
    sideways = 0
    while not state.done.all():
        before = state
        state, info = step(arrays, state)
        np.testing.assert_array_equal(info.count, state.length - before.length)
        np.testing.assert_array_equal(
            info.proposal.tokens[:, 0], before.tokens[jnp.arange(4), before.length - 1]
        )
        for row in range(toys.ROWS):
            start, count = int(before.length[row]), int(info.count[row])
            np.testing.assert_array_equal(
                state.tokens[row, start : start + count], info.tokens[row, :count]
            )
            accepted, path = int(info.num_accepted[row]), np.asarray(info.path[row])
            way = trees.ancestors(np.asarray(info.proposal.parent[row]), int(path[accepted]))
            assert path[: accepted + 1].tolist() == way
            sideways += way != list(range(accepted + 1))
    assert toys.texts(state) == toys.decoded("tree", rule, 1.0)[0]
    assert sideways > 5
