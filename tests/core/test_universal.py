"""A draft with other tokens: what it reads, what it may propose, and what happens when it is full.

`test_laws_drafts.py` checks that the text is the target's own; here the tables are made by hand.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from started import started
from toys import TABLES as toys

from specjax import RULES, Adaptive, Decoder, FirstOf, NGram, Params, Universal, UniversalParams
from specjax.contract import Context, Lookahead, Wrapper
from specjax.methods.draft_model.translated import spell
from specjax.proposers import AdaptiveParams
from specjax.types import ABSENT, Block

TABLES = toys.translation()
DRAFT = toys.model(toys.OTHER_VOCAB)
START = TABLES.start.tolist()


@functools.cache
def respelt():
    return toys.respelt(toys.weights(noise=toys.noise), TABLES)


def params(tables=TABLES):
    return Params(toys.weights(), UniversalParams(respelt(), tables))


def decoder(proposer, rule="match"):
    return Decoder(toys.model(), proposer, RULES[rule](), (toys.EOS,), toys.CAPACITY)


@functools.cache
def step():
    return jax.jit(toys.decoder("universal", "match").step)


def by_hand(tokens):
    """The draft tokens that spell target tokens."""
    return [int(p) for token in tokens for p in TABLES.pieces[token, : TABLES.count[token]]]


@pytest.mark.parametrize("width", [3, 7, 40])
def test_spell(width):
    """Rows of different lengths equal a loop; if there are too many pieces, the last are kept."""
    tokens = np.random.default_rng(0).integers(0, toys.VOCAB, (64, 12), dtype=np.int32)
    count = np.arange(64, dtype=np.int32) % 13
    spelt = jax.jit(spell, static_argnums=3)
    spelling, length = jax.device_get(spelt(TABLES, tokens, count, width))
    assert spelling.shape == (64, width)
    for row in range(64):
        wanted = by_hand(tokens[row, : count[row]])[-width:]
        assert spelling[row].tolist() == [*wanted, *[0] * (width - len(wanted))]
        assert length[row] == len(wanted)
    assert (length < width).any() and (length == width).any() == (width < 40)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_draft_reads_the_spelt_text(temperature):
    """Its cache after a run is one pass over its start and the spelling of all but the last
    block."""
    dec = toys.decoder("universal", "match")
    changes = {
        "prompt": toys.PROMPTS % 7,
        "limit": np.full(toys.ROWS, 32),
        "temperature": temperature,
    }
    state = dec.run(params(), toys.prefill(dec, params(), **changes))
    assert (state.proposer.room >= 0).all()
    spelt = [[*START, *by_hand(text[:-1])] for text in toys.texts(state)]
    unread = [
        by_hand(state.proposer.fresh[row, : state.proposer.count[row]].tolist())
        for row in range(toys.ROWS)
    ]
    width = max(map(len, spelt))
    padded = np.array([[*row, *[0] * (width - len(row))] for row in spelt], np.int32)
    read = jax.jit(lambda *given: DRAFT.apply(*given, DRAFT.init_cache(toys.ROWS, width)).cache)
    plain = read(respelt(), padded, np.broadcast_to(np.arange(width), padded.shape))
    plain = plain.commit(state.proposer.cache.length)
    for row in range(toys.ROWS):
        assert state.proposer.cache.length[row] == len(spelt[row]) - len(unread[row])
        for actual, wanted in zip(
            toys.committed(state.proposer.cache, row), toys.committed(plain, row), strict=True
        ):
            np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize("rule", toys.NOISE_KINDS)
def test_another_name_for_every_token_changes_nothing(rule):
    """If every token has a draft token, drafts, figures and texts are those of a draft with
    equal tokens."""
    names = jnp.array(
        np.random.default_rng(1).permutation(toys.OTHER_VOCAB)[: toys.VOCAB].astype(np.int32)
    )
    tables = TABLES.replace(
        pieces=names[:, None],
        count=jnp.ones_like(names),
        to_draft=names,
        start=jnp.zeros(0, jnp.int32),
    )
    arrays = Params(
        toys.weights(),
        UniversalParams(toys.respelt(toys.weights(noise=toys.noise), tables), tables),
    )
    dec = decoder(Universal(DRAFT, toys.VOCAB, 3, expansion=1), rule)
    state = dec.run(arrays, toys.prefill(dec, arrays, temperature=1.0))
    texts, wanted = toys.decoded("draft 3", rule, 1.0)
    assert toys.texts(state) == texts
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), state.stats, wanted.stats))


def test_what_is_proposed():
    """Only shared tokens are proposed, and nothing if the draft has read nothing new."""
    prompts = np.zeros_like(toys.PROMPTS)
    prompts[:, 0] = [2, 1, 11, 3]  # two that cannot be spelt, one of one piece, one of three
    single = {"prompt": prompts, "prompt_length": np.ones(toys.ROWS, np.int32)}
    state = toys.prefill(toys.decoder("universal", "match"), params(), temperature=1.0, **single)
    state, info = step()(params(), state)
    absent = np.asarray(info.proposal.parent == ABSENT)
    assert absent.sum(1).tolist() == [4, 1, 4, 1]
    seen = set()
    while not state.done.all():
        seen |= set(np.asarray(info.proposal.tokens)[~absent].tolist())
        state, info = step()(params(), state)
        absent = np.asarray(info.proposal.parent == ABSENT)
    assert len(seen) > 12
    assert all(TABLES.to_draft[token] >= 0 for token in seen)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_without_a_shared_token_nothing_is_proposed(rule):
    """It is plain decoding, and no figure is spoilt by an empty distribution."""
    arrays = params(TABLES.replace(to_draft=jnp.full_like(TABLES.to_draft, -1)))
    dec = toys.decoder("universal", rule)
    for temperature in (0.0, [1.0, 0.7, 2.0, 0.0]):
        state = dec.run(arrays, toys.prefill(dec, arrays, temperature=temperature, top_p=0.9))
        assert (state.stats.proposed == 0).all()
        plain = toys.decoder("none", rule)
        wanted = plain.run(
            toys.params("none"),
            toys.prefill(plain, toys.params("none"), temperature=temperature, top_p=0.9),
        )
        assert toys.texts(state) == toys.texts(wanted)


def test_a_draft_that_is_full_falls_silent():
    """Each row stops drafting by itself; its cache stays as it is, to the byte, while the text
    goes on."""
    # It has room for 28 tokens; the last row ends at its EOS before that.
    dec, arrays = decoder(Universal(net(40), toys.VOCAB, 3, expansion=1)), params()
    step = jax.jit(dec.step)
    state = toys.prefill(dec, arrays, limit=np.full(toys.ROWS, toys.CAPACITY))
    full, kept, silent = np.zeros(toys.ROWS, bool), {}, 0
    while not state.done.all():
        before = state
        state, info = step(arrays, state)
        proposed = np.asarray(info.proposal.parent != ABSENT).any(1)
        assert not (full & ~np.asarray(state.proposer.room < 0)).any()
        full = np.asarray(state.proposer.room < 0)
        assert not (proposed & full).any()
        silent += (full & ~np.asarray(before.done)).sum()
        for row in np.flatnonzero(full):
            leaves = [x.tobytes() for x in toys.committed(state.proposer.cache, row)]
            assert kept.setdefault(row, leaves) == leaves
    assert len(kept) > 1 and silent > 10
    assert not full.all()
    assert (state.proposer.cache.length <= toys.CAPACITY + len(START)).all()


def test_a_full_draft_reads_what_needs_no_room():
    """A token without a spelling takes no room, so the logits are those of a draft with more."""
    source = Universal(DRAFT, toys.VOCAB, 3).source
    own, one = params().proposer, jnp.ones(1, jnp.int32)

    def block(*tokens):
        return Block(jnp.array([tokens], jnp.int32), jnp.zeros((1, len(tokens), 1)), one)

    @functools.partial(jax.jit, static_argnums=0)
    def made(capacity):
        state = started(source, own, block(3, 0), capacity, Lookahead(3, 4, True))
        state = source.observe(own, state, block(3))
        rooms = []
        for pending in (2, 1):  # no piece, and one
            pending = jnp.array([pending], jnp.int32)
            context = Context(pending, None, None, True, False, None)
            state, reading, logits = source.begin(own, state, context)
            state = source.end(own, state, reading, None)
            state = source.observe(own, state, block(*pending))
            rooms.append(state.room)
        return logits, reading.readable, rooms

    (tight, readable, rooms), (wide, *_) = made(3), made(30)
    assert readable.all() and [int(room[0]) for room in rooms] == [0, 0]
    np.testing.assert_array_equal(tight, wide)


def net(max_positions):
    return dataclasses.replace(DRAFT, max_positions=max_positions)


def test_a_draft_never_reads_beyond_its_positions():
    """It reads the end of a long prompt, with room for what follows; the text is the target's."""
    max_positions = 24
    dec = decoder(Universal(net(max_positions), toys.VOCAB, 3, expansion=4))
    prompt = np.tile(toys.PROMPTS[:, :4], 2)
    state = toys.prefill(dec, params(), prompt=prompt, prompt_length=np.full(toys.ROWS, 8))
    assert state.proposer.cache.tokens.shape[1] == max_positions
    room = max_positions - 9 - 3
    lengths = [min(room // 2, 1 + len(by_hand(text[:-1]))) for text in toys.texts(state)]
    assert state.proposer.cache.length.tolist() == lengths
    state = dec.run(params(), toys.prefill(dec, params()))
    assert toys.texts(state) == toys.decoded("none", "match")[0]
    assert (state.proposer.room < 0).any()
    assert state.stats.proposed.all()


def test_too_little_context():
    """A context that is too small is refused by name, before anything is compiled."""
    proposer, prompt = (
        Universal(net(14), toys.VOCAB, 3),
        Block(jnp.zeros((1, 4), jnp.int32), None, jnp.ones(1, jnp.int32)),
    )
    with pytest.raises(
        ValueError, match="at most 14 tokens, too few to propose 3 and to read 9 at once"
    ):
        proposer.start(params().proposer, prompt, toys.CAPACITY)
    with pytest.raises(ValueError, match="num_drafts=0"):
        Universal(DRAFT, toys.VOCAB, 0)


@pytest.mark.parametrize("kind", ["first of", "adaptive", "wrapper"])
def test_what_holds_it_passes_on_that_a_prompt_is_whole(kind):
    """Within another proposer it reads a long prompt as it does alone: at once, and its end."""
    inner = Universal(net(24), toys.VOCAB, 3, expansion=4)
    tokens = jnp.asarray(np.tile(toys.PROMPTS[:, :4], 2))
    hidden = jnp.zeros((*tokens.shape, 1))
    prompt = Block(tokens, hidden, jnp.full(toys.ROWS, 7, jnp.int32))
    own = params().proposer
    proposer, arrays, find = {
        "first of": (FirstOf(NGram(3), inner), (None, own), lambda state: state[1]),
        "adaptive": (
            Adaptive(NGram(3), inner, (1, 4)),
            AdaptiveParams(None, own, jnp.ones(3), jnp.int32(-1), jnp.ones(2) / 2,
                           jnp.full(2, 2, jnp.int32)),
            lambda state: state.drafter.own,
        ),
        "wrapper": (Wrapped(inner), own, lambda state: state),
    }[kind]  # fmt: skip
    alone = inner.start(own, prompt, 40)
    held = find(proposer.start(arrays, prompt, 40))
    assert (np.asarray(alone.room) >= 0).all() and (np.asarray(alone.cache.length) > 0).all()
    np.testing.assert_array_equal(held.cache.length, alone.cache.length)
    np.testing.assert_array_equal(held.room, alone.room)


class Wrapped(Wrapper):
    def propose(self, params, state, context):
        return self.inner.propose(params, state, context)
