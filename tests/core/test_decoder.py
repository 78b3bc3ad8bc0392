"""The decoder's functions one at a time: a step can be vmapped, and invalid input is refused."""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from reference import no_repeated_pair, no_repeated_pair_reference
from toys import TABLES as toys

import specjax
from specjax._internal.jit_cache import structure_of
from specjax.decoding.commit import emit
from specjax.decoding.logprobs import Logprobs


def test_stream_refuses_an_empty_chunk():
    """Otherwise it would never end."""
    dec = toys.decoder("none", "match")
    with pytest.raises(ValueError, match="steps_per_chunk=0"):
        next(dec.stream(toys.params("none"), toys.prefill(dec, toys.params("none")), 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"prompt": np.zeros((4, toys.CAPACITY + 1), np.int32)},
            "padded to 49 tokens do not fit a capacity of 48",
        ),
        ({"prompt_length": np.array([5, 3, 0, 1])}, "prompt 2 is empty"),
        ({"prompt_length": np.array([5, 9, 6, 1])}, "prompt_length 9 is longer than the 8"),
        ({"limit": np.array([9, 9, 49, 9])}, "limit=49 is beyond the capacity of 48"),
        (
            {"prompt": toys.PROMPTS - 6},
            r"prompt 0 holds token ids from -5 to .*; the target has the ids 0 to 28",
        ),
        (
            {"prompt": np.where(toys.PROMPTS == 9, 10**6, toys.PROMPTS)},
            "prompt 1 holds .* to 1000000; the target",
        ),
        ({"prompt": toys.PROMPTS * 1.0}, "prompt is of the type float"),
        ({"prompt": toys.PROMPTS[0]}, r"prompt has the shape \(8,\); pass \[rows, tokens\]"),
        ({"limit": np.array([9, 9])}, r"limit has the shape \(2,\); pass \[rows\]"),
        ({"num_drafts": np.array([1, 1, -1, 1])}, "num_drafts=-1"),
        ({"key": jax.random.key(0)}, r"key has the shape \(\) for 4 rows"),
        ({"key": jax.random.PRNGKey(0)}, r"key is uint32\[2\] instead of 4 PRNG keys"),
    ],
)
def test_prefill_refuses_what_does_not_fit(change, message):
    """The host checks first, since a slice update beyond the buffers would silently be moved."""
    with pytest.raises(ValueError, match=message):
        toys.prefill(toys.decoder("none", "match"), toys.params("none"), **change)


def test_padding_may_be_anything():
    """The tokens behind a prompt do not matter."""
    dec, arrays = toys.decoder("none", "match"), toys.params("none")
    padded = np.where(np.arange(toys.WIDTH) < toys.LENGTHS[:, None], toys.PROMPTS, -1)
    state = dec.run(arrays, toys.prefill(dec, arrays, prompt=padded))
    assert toys.texts(state) == toys.decoded("none", "match")[0]


def test_a_limit_beyond_the_positions_of_the_target_is_refused():
    """A function model of 8 positions would emit wrong tokens behind them."""
    model = specjax.models.from_function(
        lambda params, tokens: params[tokens], vocab_size=toys.VOCAB, max_positions=8
    )
    dec = specjax.Decoder(model, specjax.NoProposer(), specjax.Match(), (), 48)
    table = jnp.eye(toys.VOCAB)
    with pytest.raises(
        ValueError, match=r"limit=14 is beyond the 8 positions .*: pass a smaller limit"
    ):
        toys.prefill(dec, specjax.Params(table), limit=np.full(toys.ROWS, 14))
    with pytest.raises(ValueError, match="limit=10 is beyond"):
        toys.prefill(dec, specjax.Params(table), limit=np.full(toys.ROWS, 10))
    # The ninth token is emitted after eight were read.
    state = toys.prefill(dec, specjax.Params(table), limit=np.full(toys.ROWS, 9))
    texts = toys.texts(dec.run(specjax.Params(table), state))
    assert texts == [
        [*prompt[:n].tolist(), *[int(prompt[n - 1])] * (9 - n)]
        for prompt, n in zip(toys.PROMPTS, toys.LENGTHS, strict=True)
    ]


@pytest.mark.parametrize("slot", [7, 4, -1, 1.0, [1]], ids=str)
def test_insert_refuses_what_is_no_slot(slot):
    """A slot beyond the batch would insert nothing, and -1 is not the last row."""
    dec, arrays = toys.decoder("none", "match"), toys.params("none")
    state, row = toys.prefill(dec, arrays), toys.prefill(dec, arrays, rows=[0])
    with pytest.raises(
        ValueError, match=re.escape(f"slot={slot} is none of the 4 rows; pass an integer, 0 to 3")
    ):
        dec.insert(state, slot, row)


def test_insert_takes_a_row_with_as_many_ends():
    """More would not fit, and fewer would be repeated."""
    dec, arrays = toys.decoder("none", "match"), toys.params("none")
    state, row = toys.prefill(dec, arrays), toys.prefill(dec, arrays, rows=[0])
    for count in (1, 8):
        other = dataclasses.replace(row, eos=jnp.full((1, count), toys.EOS))
        with pytest.raises(ValueError, match="the row and the batch are of different shapes"):
            dec.insert(state, 0, other)


def test_insert_takes_one_row():
    """From several rows it would silently insert the first."""
    dec, arrays = toys.decoder("none", "match"), toys.params("none")
    state, rows = toys.prefill(dec, arrays), toys.prefill(dec, arrays, rows=[0, 1, 2])
    with pytest.raises(ValueError, match="row holds 3 rows, and insert takes one"):
        dec.insert(state, 0, rows)


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_whose_rows_share_numbers_are_refused(impl):
    """They are refused also under jit."""
    dec, arrays = toys.decoder("none", "match"), toys.params("none")
    keys = jax.random.split(jax.random.key(0, impl=impl), toys.ROWS)
    for prefill in (
        toys.prefill,
        lambda *given, key: jax.jit(lambda key: toys.prefill(*given, key=key).length)(key),
    ):
        with pytest.raises(
            ValueError, match=f'key has the implementation "{impl}".*specjax.make_key'
        ):
            prefill(dec, arrays, key=keys)


def test_raw_keys_are_wrapped():
    """Keys of `jax.random.PRNGKey` give the same texts as typed keys."""
    dec, arrays = toys.decoder("none", "match"), toys.params("none")
    raw = jax.random.split(jax.random.PRNGKey(3), toys.ROWS)
    assert raw.dtype == jnp.uint32
    state = dec.run(arrays, toys.prefill(dec, arrays, temperature=1.0, key=raw))
    assert toys.texts(state) == toys.decoded("none", "match", 1.0)[0]


@pytest.mark.parametrize(("case", "rule"), [("none", "match"), ("draft 1", "rejection")])
def test_exact_rules_hold_under_another_default_of_random_numbers(case, rule):
    """TPU users set it to "rbg": rows still have noise of their own, and texts stay the same."""
    dec, arrays = toys.decoder(case, rule), toys.params(case)
    limit = np.full(toys.ROWS, 24, np.int32)

    def keys_of(seeds):
        return jnp.stack([specjax.make_key(seed) for seed in seeds])

    def write(**changes):
        given = {"temperature": 1.0, "limit": limit} | changes
        return toys.texts(dec.run(arrays, toys.prefill(dec, arrays, **given)))

    wanted = write(key=keys_of([3, 4, 5, 6]))
    with jax.default_prng_impl("rbg"):
        assert jax.random.key_impl(jax.random.key(0)) == "rbg"
        keys = keys_of([3, 4, 5, 6])
        assert write(key=keys) == wanted
        alone = [write(key=keys, rows=[row])[0] for row in range(toys.ROWS)]
        assert alone == wanted
        same = write(
            key=keys,
            prompt=np.tile(toys.PROMPTS[:1], (toys.ROWS, 1)),
            prompt_length=np.full(toys.ROWS, 5, np.int32),
        )
    assert len(set(map(tuple, same))) == toys.ROWS


def test_a_decoder_needs_room_for_a_token():
    """A capacity that is too small is refused by name."""
    with pytest.raises(ValueError, match="capacity=1"):
        toys.decoder("none", "match", capacity=1)


def test_a_function_of_the_caller_changes_the_logits():
    """Without any other setting, and of each token."""
    dec = specjax.Decoder(
        toys.model(), specjax.NoProposer(), specjax.Match(), (toys.EOS,), toys.CAPACITY,
        no_repeated_pair,
    )  # fmt: skip
    arrays = toys.params("none")
    naive = toys.naive_greedy(
        toys.PROMPTS, toys.LENGTHS, toys.LIMITS,
        process=lambda row, text, logits: no_repeated_pair_reference(
            logits, text, text[toys.LENGTHS[row] :]
        ),
    )  # fmt: skip
    assert naive != toys.decoded("none", "match")[0]
    assert toys.texts(dec.run(arrays, toys.prefill(dec, arrays))) == naive


def test_step_vmaps():
    """`step` is a pure function: vmapped over two stacked states it changes each as it would
    alone."""
    dec, arrays = toys.decoder("draft 1", "rejection"), toys.params("draft 1")
    states = [
        toys.prefill(dec, arrays, temperature=1.0, key=toys.keys(seed=seed)) for seed in (1, 2)
    ]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    both, _ = jax.jit(jax.vmap(dec.step, (None, 0)))(arrays, stacked)
    step = jax.jit(dec.step)
    for number, state in enumerate(states):
        alone, _ = step(arrays, state)
        np.testing.assert_array_equal(both.tokens[number], alone.tokens)
        np.testing.assert_array_equal(both.length[number], alone.length)


def test_the_numbers_of_logprobs_that_there_are():
    """None, that of each token alone, and those of all tokens."""
    given = toys.model(), specjax.NoProposer(), specjax.Match(), (), toys.CAPACITY
    for number in (None, 0, toys.VOCAB):
        specjax.Decoder(*given, num_logprobs=number)
    for number in (-1, toys.VOCAB + 1):
        with pytest.raises(ValueError, match=rf"num_logprobs={number}; .* in \[0, {toys.VOCAB}\]"):
            specjax.Decoder(*given, num_logprobs=number)


@pytest.mark.parametrize("nodes", [1, 4, 6])
def test_logprobs_by_definition(nodes: int):
    """Of a path through some nodes of a tree, and through all of a chain, which copies no logits.

    A token that a filter or a processor excludes has none.
    """
    rng, rows, size = np.random.default_rng(nodes), 3, 40
    logits = rng.normal(0, 5, (rows, nodes, size)).astype(np.float32)
    logits[1, :, 7] = -np.inf
    path = np.sort(rng.integers(0, nodes, (rows, 4)), 1)
    tokens = rng.integers(0, size, (rows, 4))
    tokens[:2, 1] = 7
    sampling = specjax.Sampling.create(rows, temperature=[0.0, 0.7, 1.0], top_k=30)
    warped = np.asarray(specjax.warp(jnp.asarray(logits), sampling))
    made = [
        jax.jit(functools.partial(Logprobs.measure, num_top=top))(logits, warped, path, tokens)
        for top in (0, 2)
    ]
    for x, name in ((logits, "raw"), (warped, "warped")):
        of_path = x.astype(np.float64)[np.arange(rows)[:, None], path]
        every = of_path - np.log(np.exp(of_path).sum(-1, keepdims=True))
        wanted = np.take_along_axis(every, tokens[..., None], 2)[..., 0]
        assert np.isinf(wanted[1, 1])
        for one in made:
            np.testing.assert_allclose(getattr(one, name), wanted, rtol=1e-5, atol=1e-5)
    assert made[0].top.shape == made[0].top_ids.shape == (rows, 4, 0)


def test_what_a_step_emits_by_definition():
    """The accepted drafts and the next token up to an EOS or the limit; nothing of done rows."""
    rng, rows, depth = np.random.default_rng(0), 64, 3
    accepted = rng.integers(0, 9, (rows, depth + 1), np.int32)
    number, following = rng.integers(0, depth + 1, rows), rng.integers(0, 9, rows)
    length, room, done = np.full(rows, 7), rng.integers(1, 6, rows), rng.random(rows) < 0.2
    eos = np.where(rng.random((rows, 2)) < 0.5, rng.integers(0, 9, (rows, 2)), -1)
    state = types.SimpleNamespace(length=length, limit=length + room, eos=eos, done=done)
    emitted, count, after = jax.jit(
        lambda fields, *given: emit(types.SimpleNamespace(**fields), *given)
    )(vars(state), accepted, number, following)
    for row in range(rows):
        tokens = [*accepted[row, 1 : number[row] + 1].tolist(), int(following[row])][: room[row]]
        ends = [at for at, token in enumerate(tokens) if token in set(eos[row].tolist()) - {-1}]
        tokens = tokens[: ends[0] + 1] if ends else tokens
        wanted = 0 if done[row] else len(tokens)
        assert count[row] == wanted and emitted[row, :wanted].tolist() == tokens[:wanted]
        assert after[row] == (done[row] or bool(ends) or len(tokens) == room[row])


@struct.dataclass
class NumberedMatch(specjax.Match):
    number: float = 0.0


@struct.dataclass
class NumberedRejection(specjax.Rejection):
    number: float = 0.0


def test_rules_of_two_classes_never_share_a_program():
    """JAX 0.10.2 says that the structures of two dataclasses with the same fields are equal."""
    ngram = specjax.NGram(2)
    one, other = (
        specjax.Decoder(toys.model(), ngram, rule)
        for rule in (NumberedMatch(), NumberedRejection())
    )
    assert one != other
    assert one == specjax.Decoder(toys.model(), ngram, NumberedMatch(1.0))

    @functools.partial(jax.jit, static_argnums=0)
    def shared(decoder, x):
        return x + decoder.rule.shared_noise

    assert (shared(one, 0), shared(other, 0)) == (1, 0)
    trees = [structure_of((rule, {"a": None})) for rule in (NumberedMatch(), NumberedRejection())]
    assert trees[0] != trees[1]
    assert trees[0] == structure_of((NumberedMatch(2.0), {"a": None}))
