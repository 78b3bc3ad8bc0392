"""The laws of decoding for every proposer and rule: a proposal changes the speed, never the text.

Where a law needs a perfect draft, the target's own weights serve as the draft's.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
import trees
from flax.traverse_util import flatten_dict, unflatten_dict

from specjax import PROPOSERS, RULES, Decoder, DraftModel, Match, NoProposer, Params, metrics
from specjax.proposers import Chain

PERFECT = Params(toys.weights(), toys.weights())
SHARED = [name for name, rule in RULES.items() if rule.shared_noise and rule.exact]
GAMMA = 3  # num_drafts of "draft 3"


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
    assert len([kind for kind in toys.KINDS if len(kind) == 2]) == 9


@pytest.mark.parametrize(("case", "rule"), toys.PAIRS)
def test_greedy_speculation_is_greedy_decoding(case, rule):
    """Greedy texts of ragged prompts equal those of a decoder without a cache."""
    texts, state = toys.decoded(case, rule)
    assert texts == naive()
    # The prompts cover EOS, limits, and drafts both accepted and rejected.
    assert [text[-1] == toys.EOS for text in texts] == [False, False, False, True]
    assert [len(text) for text in texts[:3]] == toys.LIMITS[:3].tolist()
    if state.stats.proposed.sum():
        assert 0 < state.stats.accepted.sum() < state.stats.tested.sum()


@pytest.mark.parametrize(("case", "rule"), toys.PAIRS)
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


@pytest.mark.parametrize(("case", "rule"), toys.PAIRS)
def test_a_greedy_row_of_a_sampled_batch_is_greedy(case, rule):
    """Settings belong to a row."""
    texts = toys.texts(run(case, rule, temperature=[1.0, 0.0, 1.5, 0.0]))
    assert [texts[1], texts[3]] == [naive()[1], naive()[3]]
    assert texts[0] == toys.decoded(case, rule, 1.0)[0][0]


@pytest.mark.parametrize(("case", "rule"), toys.PAIRS)
def test_keys_decide(case, rule):
    """Other keys give other texts, and the same keys the same texts."""
    again = toys.texts(run(case, rule, temperature=1.0))
    assert again == toys.decoded(case, rule, 1.0)[0]
    others = toys.texts(run(case, rule, temperature=1.0, key=toys.keys(seed=4)))
    assert all(x != y for x, y in zip(again, others, strict=True))


@pytest.mark.parametrize(("case", "rule"), toys.PAIRS)
def test_the_order_of_rows_does_not_matter(case, rule):
    """A permuted batch gives the permuted texts, also when sampled."""
    order = [2, 0, 3, 1]
    texts = toys.decoded(case, rule, 1.0)[0]
    assert toys.texts(run(case, rule, rows=order, temperature=1.0)) == [texts[row] for row in order]


@pytest.mark.parametrize(("case", "rule"), toys.ALONE)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_alone_is_that_row_in_a_batch(case, rule, temperature):
    """The text of a row does not depend on the rows beside it."""
    for row in range(toys.ROWS):
        alone = run(case, rule, rows=[row], temperature=temperature)
        assert toys.texts(alone) == toys.decoded(case, rule, temperature)[0][row : row + 1]


@pytest.mark.parametrize(("case", "rule"), toys.ALONE)
def test_an_inserted_row_is_that_row_alone(case, rule):
    """A row inserted into a running batch decodes as alone, and the other rows go on unchanged."""
    dec, arrays = toys.decoder(case, rule), toys.params(case)
    state = dec.run(arrays, toys.prefill(dec, arrays, temperature=1.0), 2)
    assert not state.done.all()
    state = dec.insert(state, 1, toys.prefill(dec, arrays, rows=[2], temperature=1.0))
    state = dec.run(arrays, state)
    texts, alone = toys.decoded(case, rule, 1.0)
    assert toys.texts(state) == [texts[0], texts[2], texts[2], texts[3]]
    for field in ("target_passes", "emitted", "accepted", "tested", "proposed"):
        assert getattr(state.stats, field)[1] == getattr(alone.stats, field)[2]


@pytest.mark.parametrize(("case", "rule"), toys.ALONE)
def test_a_row_inserted_into_an_idle_batch(case, rule):
    """A finished batch decodes a newly inserted row, and its finished rows stay as they were."""
    dec, arrays = toys.decoder(case, rule), toys.params(case)
    state = dec.run(arrays, toys.prefill(dec, arrays))
    before = toys.texts(state)
    state = dec.insert(state, 3, toys.prefill(dec, arrays, rows=[0]))
    state = dec.run(arrays, state)
    assert toys.texts(state) == [*before[:3], naive()[0]]


@pytest.mark.parametrize(("case", "rule"), toys.PAIRS)
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


@pytest.mark.parametrize(("case", "rule"), toys.PAIRS)
def test_the_cache_after_a_run_is_the_text_read_plainly(case, rule):
    """Committed keys and values are those of one pass over the final text."""
    texts, state = toys.decoded(case, rule)
    padded = np.zeros((toys.ROWS, toys.CAPACITY), np.int32)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    plain = read_plainly(padded.tobytes())
    for row in range(toys.ROWS):
        wanted = toys.committed(plain.replace(length=state.cache.length), row)
        for found, want in zip(toys.committed(state.cache, row), wanted, strict=True):
            np.testing.assert_allclose(found, want, rtol=0, atol=2e-5 * np.abs(want).max())


@functools.cache
def read_plainly(tokens):
    tokens = np.frombuffer(tokens, np.int32).reshape(toys.ROWS, toys.CAPACITY)
    positions = np.broadcast_to(np.arange(toys.CAPACITY), tokens.shape)
    net = toys.model()
    cache = net.init_cache(toys.ROWS, toys.CAPACITY)
    return jax.device_get(jax.jit(net.apply)(toys.weights(), tokens, positions, cache).cache)


@pytest.mark.parametrize("rule", RULES)
def test_an_end_inside_a_block_ends_the_row(rule):
    """EOS anywhere in a block ends the row: nothing behind it is emitted, committed or counted."""
    text = naive()[3]
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
    )
    assert text[-1] == toys.EOS
    assert len(text) == 6
    assert toys.texts(state) == [text] * 4
    np.testing.assert_array_equal(state.cache.length, [5] * 4)
    assert state.stats.emitted.tolist() == [5, 4, 3, 2]
    assert state.stats.target_passes.tolist() == [2, 1, 1, 1]
    assert state.stats.accepted.tolist() == [
        4,
        3,
        3,
        2,
    ]  # whole blocks are accepted: 3 drafts, then 1 up to the end
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


@pytest.mark.parametrize(("case", "rule"), toys.PAIRS)
def test_the_whole_capacity_can_be_used(case, rule):
    """Rows that fill their buffers to the last slot are exact, though the last blocks reach
    beyond it."""
    state = run(case, rule, limit=np.full(toys.ROWS, toys.CAPACITY, np.int32))
    assert toys.texts(state) == full()
    assert [len(text) for text in full()[:3]] == [toys.CAPACITY] * 3


@functools.cache
def full():
    return toys.naive_greedy(toys.PROMPTS, toys.LENGTHS, np.full(toys.ROWS, toys.CAPACITY))


@pytest.mark.parametrize(("case", "rule"), toys.PAIRS)
def test_rows_that_are_done_at_the_start_stay_as_they_are(case, rule):
    """If the limits are already reached, there is no step, no token, and all figures are 0."""
    limits = toys.LENGTHS - np.array([0, 1, 0, 1], np.int32)
    state = run(case, rule, limit=limits)
    assert toys.texts(state) == [
        p[:n].tolist() for p, n in zip(toys.PROMPTS, toys.LENGTHS, strict=True)
    ]
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(state.stats))


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
        key=toys.keys(seed=NO_END.get(rule, 0)),
    )
    assert state.length.tolist() == limits.tolist()
    assert state.stats.target_passes.tolist() == [5, 3, 7, 0]
    assert metrics.acceptance_rate(state.stats) == 1
    assert metrics.mean_accepted_length(state.stats) == GAMMA + 1


NO_END = {"match": 5, "rejection": 5, "block": 5}
"""Seeds at which no text ends before its limit."""


@pytest.mark.parametrize(("case", "rule"), toys.PAIRS)
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


@pytest.mark.parametrize(("case", "rule"), toys.PAIRS)
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


def transposed(params):
    """The parameters in the layout of `Transformer(transposed=True)`."""
    flat = flatten_dict(params)
    kernels = {path: flat.pop(path) for path in list(flat) if path[-1] == "kernel"}
    turned = {(*path[:-1], "weight"): kernel.T for path, kernel in kernels.items()}
    return unflatten_dict({**flat, **turned})


@functools.cache
def state_in(dtype, case):
    """The last state under `match` at temperature 1, with weights and caches in `dtype`, laid
    out as by `load`."""
    if dtype == jnp.float32:
        return toys.decoded(case, "match", 1.0)[1]
    net, proposer = toys.model(dtype=dtype), toys.CASES[case][0]
    net = dataclasses.replace(net, module=net.module.clone(transposed=True))
    if isinstance(proposer, Chain):
        proposer = DraftModel(net, toys.VOCAB, proposer.num_drafts)
    given = jax.tree.map(lambda x: x.astype(dtype), toys.params(case))
    arrays = Params(
        *(transposed(part) if part else part for part in (given.target, given.proposer))
    )
    dec = Decoder(net, proposer, Match(), (toys.EOS,), toys.CAPACITY)
    return jax.device_get(
        dec.run(arrays, toys.prefill(dec, arrays, temperature=1.0)).replace(key=None)
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bit_exact_mode(dtype):
    """A chain has the same bits as plain decoding of the same width: its tokens and the target's
    cache."""
    padded, drafted = state_in(dtype, "none padded"), state_in(dtype, "draft 3")
    assert toys.CASES["none padded"][0] == NoProposer(num_nodes=GAMMA + 1)
    assert drafted.stats.accepted.sum() > 10
    assert toys.texts(drafted) == toys.texts(padded)
    for row in range(toys.ROWS):
        pairs = zip(
            toys.committed(drafted.cache, row), toys.committed(padded.cache, row), strict=True
        )
        for found, wanted in pairs:
            assert found.dtype == dtype
            assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("size", [toys.VOCAB - 5, toys.VOCAB + 6])
@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.exact])
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
    if rule in SHARED:
        assert toys.texts(state) == toys.decoded("none", rule, 1.0)[0]


@pytest.mark.parametrize("rule", [rule for rule in RULES if toys.judges(rule, "tree")])
def test_a_step_tells_what_it_did(rule):
    """StepInfo describes the emission; on a tree, paths leave the first branch and the state
    follows them."""
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
