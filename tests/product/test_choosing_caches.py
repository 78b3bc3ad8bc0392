"""`ChoosingCache`: chunks of a text that queries choose, and drafts that need what they choose."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import TRANSFORMERS as toys

import specjax
from specjax import RULES, Decoder, KVCache, NearSelfSource, Params, Sampling, StaticTree
from specjax.caches import ChoosingCache, PagedCache, as_read, chunks_of_turn, summarised
from specjax.models import LinenModel, Transformer, TransformerConfig
from specjax.proposers import Chain

pytestmark = pytest.mark.xdist_group("choosing caches")  # a share takes all of them, or none

FIRST, LAST, CHUNK, ROOM = 2, 3, 4, 5
LENGTHS = np.array([0, 4, 13, 21, 40, 60])
HEADS, KEY_HEADS, DIM, SLOTS = 4, 2, 8, 60


def filled(dtype=jnp.float32):
    """A cache of one layer in which every committed slot is another; the others hold scratch."""
    rng = np.random.default_rng(5)
    shape = len(LENGTHS), KEY_HEADS, SLOTS, DIM
    empty = KVCache.of([(KEY_HEADS, DIM, DIM)], len(LENGTHS), SLOTS, jnp.float32)
    if dtype is jnp.int8:
        empty = empty.rounded("int8")
    keys, values = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
    keys, values = empty.stage(keys, values)
    return dataclasses.replace(empty, keys=(keys,), values=(values,), length=jnp.array(LENGTHS))


def bounds_of(cache, dtype=jnp.float32):
    slots = SLOTS // CHUNK + chunks_of_turn(CHUNK)
    none = KVCache.of([(KEY_HEADS, DIM, DIM)], len(LENGTHS), slots, dtype)
    return summarised(none, cache, FIRST, CHUNK)


def choosing(cache, selected):
    return ChoosingCache(cache, bounds_of(cache), FIRST, LAST, CHUNK, selected, ROOM)


def queries(seed=1):
    shape = len(LENGTHS), 1, HEADS, DIM
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def by_definition(keys, query, length, selected):
    """The slots that a key head reads: of one row, in numpy."""
    starts = [s for s in range(FIRST, length, CHUNK) if s + CHUNK <= length - LAST]
    best = {}
    for start in starts:
        chunk = keys[start : start + CHUNK]
        best[start] = max(np.maximum(q * chunk.max(0), q * chunk.min(0)).sum() for q in query)
    kept = sorted(best, key=best.get, reverse=True)[:selected]
    after = FIRST + len(starts) * CHUNK
    slots = [*range(min(FIRST, length)), *(s + i for s in kept for i in range(CHUNK))]
    return slots + list(range(after, length))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
@pytest.mark.parametrize("selected", [1, 3, 100])
def test_each_key_head_reads_the_chunks_with_the_greatest_bounds(selected, dtype):
    cache, query = filled(dtype), queries()
    chosen = choosing(cache, selected).chosen(query)
    keys = np.asarray(as_read(cache.keys[0], jnp.float32), np.float32)
    by_head = np.asarray(query)[:, 0].reshape(len(LENGTHS), KEY_HEADS, -1, DIM)
    for row, length in enumerate(LENGTHS):
        for head in range(KEY_HEADS):
            slots = by_definition(keys[row, head], by_head[row, head], length, selected)
            assert int(chosen.length[row]) == len(slots) >= min(length, LAST)
            for mine, whole in zip(chosen.whole(), cache.whole(), strict=True):
                np.testing.assert_array_equal(
                    mine[row, head, : len(slots)], whole[row, head, np.array(slots, int)]
                )
    assert chosen.capacity >= int(chosen.length.max()) + ROOM


def test_the_bounds_are_above_every_score():
    cache, query = filled(), queries()
    made = choosing(cache, 1)
    bounds = np.asarray(made._bounds(query, jnp.full(len(LENGTHS), 99)))
    grouped = query[:, 0].reshape(len(LENGTHS), KEY_HEADS, -1, DIM)
    scores = np.asarray(jnp.einsum("bkgd,bksd->bkgs", grouped, cache.keys[0])).max(2)
    for row, length in enumerate(LENGTHS):
        for number in range(max(length - FIRST, 0) // CHUNK):
            start = FIRST + number * CHUNK
            of_chunk = scores[row, :, start : start + CHUNK].max(1)
            assert (bounds[row, :, number] >= of_chunk - 1e-5).all()
            assert (bounds[row, :, number] < of_chunk + 30).all()


def test_bounds_that_are_carried_on_are_those_of_a_whole_text():
    """Whatever a step commits, less than a chunk or several turns of them."""
    cache, whole = filled(), None
    grown = bounds_of(dataclasses.replace(cache, length=jnp.zeros_like(cache.length)))
    for part in (1, 3, 4, 5, 21, 60):
        length = jnp.minimum(cache.length, part)
        grown = summarised(grown, dataclasses.replace(cache, length=length), FIRST, CHUNK)
        assert grown.length.tolist() == (np.maximum(length - FIRST, 0) // CHUNK).tolist()
    whole = bounds_of(cache)
    for row, count in enumerate(np.asarray(whole.length)):
        for mine, wanted in zip((*grown.whole(),), (*whole.whole(),), strict=True):
            np.testing.assert_array_equal(mine[row, :, :count], wanted[row, :, :count])


def test_pages_are_read_as_slots():
    cache, page = filled(), 10
    count = SLOTS // page
    table = 1 + np.random.default_rng(2).permutation(len(LENGTHS) * count).reshape(-1, count)

    def pool(x):
        pages = x[:, :, :SLOTS].reshape(len(LENGTHS), KEY_HEADS, count, page, DIM).swapaxes(1, 2)
        pages = pages.reshape(-1, KEY_HEADS, page, DIM)
        return jnp.zeros((1 + len(pages), *pages.shape[1:])).at[table.ravel()].set(pages)

    paged = PagedCache(
        (pool(cache.keys[0]),), (pool(cache.values[0]),), cache.length, table=jnp.array(table),
        page=page,
    )  # fmt: skip
    made, wanted = (choosing(x, 2).chosen(queries()) for x in (paged, cache))
    for mine, other in zip(made.whole(), wanted.whole(), strict=True):
        for row, length in enumerate(np.asarray(wanted.length)):
            np.testing.assert_array_equal(mine[row, :, :length], other[row, :, :length])


# Facts far away.  The token a(i) asks, and the fact f(i) answers it with a(i + 1).

ASKED = 12
FACT, NOTHING = ASKED, 2 * ASKED  # the first fact, and a token that says nothing


@functools.cache
def far():
    """A model of one layer without positions, whose next token stands in a fact of the text.

    The residual stream has four parts: the question of a token, the question to which a fact
    belongs, the answer of that fact, and the answer that attention has found.
    """
    config = TransformerConfig(
        vocab_size=2 * ASKED + 1, hidden_size=4 * ASKED, mlp_size=1, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=ASKED, max_positions=4096, rope=None,
    )  # fmt: skip
    model = LinenModel(Transformer(config))
    params = jax.tree.map(np.zeros_like, jax.device_get(model.init(jax.random.key(0))))
    own, one = np.eye(ASKED, dtype=np.float32), slice
    asks, answers_to, answers, found = (one(n * ASKED, (n + 1) * ASKED) for n in range(4))
    for norm in (params["norm"], *(params["layer_0"][f"{x}_norm"] for x in ("attention", "mlp"))):
        norm["weight"][:] = 1
    params["embedding"][:ASKED, asks] = own
    params["embedding"][FACT:NOTHING, answers_to] = own
    params["embedding"][FACT:NOTHING, answers] = np.roll(own, 1, axis=1)
    params["embedding"][NOTHING] = 0.1
    attention = params["layer_0"]["attention"]
    attention["q"]["kernel"][asks] = 8 * own
    attention["k"]["kernel"][answers_to] = own
    attention["v"]["kernel"][answers] = own
    attention["o"]["kernel"][:, found] = own
    params["head"]["kernel"][found, :ASKED] = own
    return model, jax.tree.map(jnp.asarray, params)


def asked_far_away(source, rule):
    """Decodes texts whose facts stand in a chunk of their own, far before the question."""
    model, params = far()
    texts = np.full((3, 200), NOTHING, np.int32)
    lengths = np.array([200, 150, 181], np.int32)
    for row, (length, at) in enumerate(zip(lengths, (85, 21, 117), strict=True)):
        texts[row, at : at + ASKED] = FACT + np.arange(ASKED)
        texts[row, length - 1] = row
    dec = Decoder(model, Chain(source, 4) if source else specjax.NoProposer(), rule, (), 256)
    both = Params(params, params)
    state = dec.prefill(
        both, texts, lengths, limit=lengths + 20, sampling=Sampling.create(3, 0.0),
        key=jax.random.split(jax.random.key(1), 3),
    )  # fmt: skip
    state = dec.run(both, state)
    rows = zip(np.asarray(state.tokens), lengths, strict=True)
    return [row[n : n + 20].tolist() for row, n in rows], state.stats


@pytest.mark.parametrize("rule", toys.NOISE_KINDS)
def test_what_stands_far_away_is_found_by_queries_alone(rule):
    """The window and the sinks see no fact, and with one chunk of all the drafts are right."""
    model, _ = far()
    plain, _ = asked_far_away(None, RULES[rule]())
    assert plain == [[(row + 1 + i) % ASKED for i in range(20)] for row in range(3)]
    counts = {}
    for selected in (0, 1):
        source = NearSelfSource(model, 16, sinks=4, selected=selected, chunk=16)
        texts, stats = asked_far_away(source, RULES[rule]())
        assert texts == plain
        counts[selected] = int(stats.accepted.sum()), int(stats.tested.sum())
    assert counts[0][0] < 0.2 * counts[0][1]
    assert counts[1][0] == counts[1][1] > 40


def test_a_tree_finds_it_too():
    model, params = far()
    source = NearSelfSource(model, 16, sinks=4, selected=1, chunk=16)
    texts = np.full((1, 120), NOTHING, np.int32)
    texts[0, 37 : 37 + ASKED], texts[0, -1] = FACT + np.arange(ASKED), 0
    dec = Decoder(model, StaticTree(source, (2, 1, 1)), RULES["match"](), (), 160)
    both = Params(params, params)
    state = dec.prefill(
        both, texts, np.array([120]), limit=np.array([132]), sampling=Sampling.create(1, 0.0),
        key=jax.random.split(jax.random.key(1), 1),
    )  # fmt: skip
    state = dec.run(both, state)
    assert np.asarray(state.tokens)[0, 120:132].tolist() == [(1 + i) % ASKED for i in range(12)]
    assert int(state.stats.accepted[0]) == 9  # in three steps
