"""The laws of decoding with draft models that are perfect or differ from the target in vocabulary.

Perfect drafts fill whole blocks, so that ends and limits cut them and bits can be compared.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trees
from flax.traverse_util import flatten_dict, unflatten_dict
from toys import TABLES as toys

from specjax import RULES, Decoder, DraftModel, Match, NoProposer, Params, metrics
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
        for actual, wanted in pairs:
            assert actual.dtype == dtype
            assert actual.tobytes() == wanted.tobytes()


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
