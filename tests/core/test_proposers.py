"""What the proposers draft, against drafting without caches, masks and batches."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from proposal_laws import TEMPERATURE, ranked, softmax, steps
from table_sources import TableSource
from toy_models import transformer
from toys import TABLES as toys
from watched import Watched

from specjax import (
    RULES,
    Decoder,
    DraftModel,
    DraftTree,
    EarlyExit,
    FirstOf,
    Medusa,
    NGram,
    Proposal,
    Universal,
    sampling,
    tree,
)
from specjax.contract import Context
from specjax.methods import DraftSource, EarlyExitSource, MedusaSource, TranslatedSource
from specjax.proposers import Chain, ChoiceTree, StaticTree
from specjax.proposers.own_text import OwnText
from specjax.types import Block

NET = toys.model(num_layers=1)


def test_a_static_tree_has_its_shape():
    """(3, 2, 1) has levels of 3, 6 and 6 nodes below the root, siblings side by side."""
    proposer = DraftTree(NET, toys.VOCAB, [3, 2, 1])
    assert proposer == DraftTree(NET, toys.VOCAB, (3, 2, 1))
    assert hash(proposer) == hash(DraftTree(NET, toys.VOCAB, (3, 2, 1)))
    assert (proposer.num_nodes, proposer.max_depth) == (16, 3)
    assert proposer.parent.tolist() == [-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("branching", [(3, 1, 2), (4,)])
def test_a_static_tree_has_logits_for_each_node(branching):
    """Those of a node's children, with a row for each node of the last level too."""
    proposer, size = StaticTree(TableSource(7), branching), 7
    table = np.random.default_rng(0).normal(size=(size, size)).astype(np.float32)
    draw = sampling.IndependentDraw.create(
        jax.random.split(jax.random.key(0), 2), jnp.zeros(2, jnp.int32), size, proposer.num_nodes
    )

    @jax.jit
    def propose(table, pending):
        context = Context(pending, draw, lambda x, path: x, False, True, None)
        return proposer.propose(table, (), context)[0]

    made = propose(table, np.array([1, 5], np.int32))
    assert made.logits.shape == (*made.tokens.shape, size) == (2, proposer.num_nodes, size)
    inner = sorted(set(proposer.parent[1:].tolist()))
    np.testing.assert_array_equal(made.logits[:, inner], table[made.tokens[:, inner]])


class Deeper(TableSource):
    """The logits after a draft are a row of the table, rolled by the draft's distance from the
    root."""

    def read_tree(self, params, reading, tokens, at, depth, mask):
        reading, logits = super().read_tree(params, reading, tokens, at, depth, mask)
        return reading, jax.vmap(jax.vmap(jnp.roll))(logits, depth[at] + 1)


def test_a_static_tree_tells_its_source_how_deep_each_node_lies():
    """The drafts of the first level have depth 0, as `Source.read_tree` says."""
    proposer, size = StaticTree(Deeper(7), (2, 2, 1)), 7
    table = np.random.default_rng(0).normal(size=(size, size)).astype(np.float32)
    draw = sampling.IndependentDraw.create(
        jax.random.split(jax.random.key(0), 1), jnp.zeros(1, jnp.int32), size, proposer.num_nodes
    )

    @jax.jit
    def propose(table, pending):
        context = Context(
            pending, draw, lambda x, path: x, False, False, None, sampled=jnp.array(False)
        )
        return proposer.propose(table, (), context)[0]

    made = propose(table, np.array([3], np.int32))
    tokens, deep = made.tokens[0].tolist(), tree.depth(jnp.asarray(proposer.parent)).tolist()
    for node in sorted(set(proposer.parent[1:].tolist())):
        children = np.flatnonzero(proposer.parent == node)
        best = np.argsort(-np.roll(table[tokens[node]], deep[node]))[: len(children)]
        assert [tokens[child] for child in children] == best.tolist()


@pytest.mark.parametrize(
    ("case", "own"), [("draft 3", True), ("draft 6", True), ("first of", False)]
)
def test_a_draft_reads_no_token_twice(case, own):
    """Its cache holds the text with its accepted drafts; of its own drafts at most the last is
    unread."""
    dec, arrays = toys.decoder(case, "match"), toys.params(case)
    (drafter, weights) = (
        toys.CASES[case] if own else (toys.CASES[case][0].second, toys.CASES[case][1][1])
    )
    prompt = toys.PROMPTS % (toys.VOCAB if own else 3)
    state, unread, kept = toys.prefill(dec, arrays, prompt=prompt), [], 0
    read = jax.jit(
        lambda tokens: (
            drafter.source.model.apply(weights, tokens, jnp.arange(64)[None], empty).cache
        )
    )
    empty = drafter.source.model.init_cache(1, 64)
    while not state.done.all():
        before = np.asarray(state.length)
        state = dec.run(arrays, state, 1)
        seen = jax.device_get(state.replace(key=None))
        draft, live = (seen.proposer if own else seen.proposer[1]), ~seen.done
        assert (draft.cache.length + draft.count == seen.cache.length).all()
        unread += draft.count[live].tolist()
        kept += int((draft.cache.length >= before)[live].sum())
        for row in np.flatnonzero(live)[:2]:
            text, length = seen.tokens[row, : seen.length[row]], int(draft.cache.length[row])
            assert draft.fresh[row, : draft.count[row]].tolist() == text[length:-1].tolist()
            tokens = np.zeros((1, 64), np.int32)
            tokens[0, : len(text)] = text
            plain = toys.committed(read(tokens).commit(jnp.array([length])), 0)
            pairs = zip(toys.committed(draft.cache, row), plain, strict=True)
            assert all(np.allclose(actual, wanted, atol=1e-5) for actual, wanted in pairs)
    assert kept > 3
    assert (max(unread) <= 1) == own, "a draft model must read the drafts of others"


def test_where_nobody_drafts_the_pass_is_plain():
    """A prompt without repetition is read in passes of width 1; wide passes wait for a match.
    Texts agree."""
    target = Watched(toys.model())

    def run(proposer):
        target.widths.clear()
        dec = Decoder(target, proposer, RULES["match"](), (), toys.CAPACITY)
        state = dec.run(toys.params("ngram"), toys.prefill(dec, toys.params("ngram"), rows=[0]))
        jax.effects_barrier()
        passes = int(state.stats.target_passes[0])
        return toys.texts(state), target.widths[1:], passes

    sparing, seen, passes = run(NGram(3, min_ngram=1))
    always, wide, as_many = run(NGram(3, min_ngram=1, may_abstain=False))
    assert sparing == always == [toys.decoded("none", "match")[0][0]]
    assert set(seen) == {1, 4} and set(wide) == {4}
    assert len(seen) == passes == len(wide) == as_many


def test_passes_are_spared_where_no_chain_goes_on():
    """The passes are inside a conditional; without a threshold there is none."""

    def program(threshold):
        dec = Decoder(
            toys.model(),
            DraftModel(NET, toys.VOCAB, 3, threshold),
            RULES["match"](),
            (),
            toys.CAPACITY,
        )
        arrays = toys.params("draft 6")
        state = jax.eval_shape(functools.partial(toys.prefill, dec, arrays))
        return str(jax.make_jaxpr(dec.step)(arrays, state)).count("cond[")

    assert program(0.5) == program(0.0) + 2


def test_the_first_proposer_of_a_row_is_asked_first():
    """Rows with a match copy it, with all mass on the copied tokens; the other rows ask the
    model."""
    proposer, chosen = toys.CASES["first of"][0], {True: 0, False: 0}
    for state, proposal in steps(toys, "first of", "rejection", 3):
        text = state.tokens[:, : toys.CAPACITY + proposer.num_nodes]
        look_up = jax.jit(jax.vmap(proposer.first._look_up))
        pending = np.asarray(state.tokens)[np.arange(toys.ROWS), np.asarray(state.length) - 1]
        copied, parent = jax.device_get(look_up(text, state.length - 1, pending))
        for row in range(toys.ROWS):
            matched = bool((parent[row] >= 0).any())
            chosen[matched] += 1
            tokens, chances = proposal.tokens[row], [*map(softmax, proposal.logits[row])]
            assert proposal.parent[row].tolist() == [-1, 0, 1, 2]
            if matched:
                assert tokens.tolist() == copied[row].tolist()
                assert [chances[n][tokens[n + 1]] for n in range(3)] == [1, 1, 1]
            else:
                best, _ = ranked(toys, state, "rejection", row, [], 0, TEMPERATURE[row])
                assert tokens[1] == best[0]
    assert min(chosen.values()) > 1


def test_short_forms_are_shapes_over_sources():
    """The common combinations have a name each, which takes the options of the shape and of the
    source."""
    heads, other = toys.OWN, toys.model(toys.OTHER_VOCAB)
    assert DraftModel(NET, toys.VOCAB, 3, 0.2) == Chain(DraftSource(NET, toys.VOCAB), 3, 0.2)
    assert DraftTree(NET, toys.VOCAB, (2, 2)) == StaticTree(DraftSource(NET, toys.VOCAB), (2, 2))
    layers = transformer()
    assert EarlyExit(layers, 1, 3, 0.2) == Chain(EarlyExitSource(layers, 1), 3, 0.2)
    assert Universal(other, toys.VOCAB, 3, 4, 0.2) == Chain(
        TranslatedSource(other, toys.VOCAB, 4), 3, 0.2
    )
    assert Medusa(heads, [[0], [0, 0]]) == ChoiceTree(MedusaSource(heads), ((0,), (0, 0)))


def test_a_narrow_proposal_is_padded():
    """Absent nodes fill it up to the size of the wider proposal."""
    proposer = FirstOf(NGram(2), DraftTree(NET, toys.VOCAB, (2, 2)))
    narrow = Proposal(
        jnp.ones((1, 3), jnp.int32), jnp.array([[-1, 0, 1]]), jnp.ones((1, 3, toys.VOCAB))
    )
    padded = proposer._padded(narrow)
    assert padded.parent.tolist() == [[-1, 0, 1, -1, -1, -1, -1]]
    assert (padded.tokens.shape, padded.logits.shape) == ((1, 7), (1, 7, toys.VOCAB))


def test_a_lookup_behind_a_draft_has_logits_for_the_vocabulary():
    """Where the first of two draws drafts and the second copies, both have a row of logits."""
    size = 7
    proposer = FirstOf(Chain(TableSource(size), 2), NGram(2))
    draw = sampling.IndependentDraw.create(
        jax.random.split(jax.random.key(0), 1), jnp.zeros(1, jnp.int32), size, 3
    )

    @jax.jit
    def propose(table, pending):
        context = Context(pending, draw, lambda x, path=None: x, False, True, None)
        return proposer.propose((table, None), ((), text), context)[0]

    text = OwnText(np.zeros((1, 9), np.int32), np.zeros(1, np.int32))
    made = propose(np.eye(size, dtype=np.float32), np.array([1], np.int32))
    assert made.logits.shape == (1, 3, size) and not made.point_mass
    np.testing.assert_array_equal(made.logits[0, 0], np.eye(size)[1])


class Adapted(NGram):
    """Remembers the adapters of its rows in the place of its state."""

    def adapt(self, state, adapter):
        return state, adapter


def test_both_proposers_know_the_adapters_of_a_row():
    both = FirstOf(Adapted(2), Adapted(2))
    assert both.adapt(("one", "two"), 5) == (("one", 5), ("two", 5))


def test_an_own_text_holds_its_capacity():
    """A block at the end stands where it belongs, with its padding behind the capacity."""
    prompt = Block(np.zeros((2, 3), np.int32), np.zeros((2, 3, 1)), np.zeros(2, np.int32))
    text = OwnText.empty(prompt, 7, 3)
    for start, count in ((1, 3), (4, 3), (7, 1)):
        tokens = np.arange(start, start + 3, dtype=np.int32) + np.array([[0], [10]], np.int32)
        text = text.append(Block(tokens, np.zeros((2, 3, 1)), np.full(2, count)))
    assert text.length.tolist() == [7, 7]
    assert text.tokens[:, :7].tolist() == [[*range(1, 8)], [*range(11, 18)]]


def test_two_proposers_that_may_abstain():
    """If no row has a draft of either, the target reads the pending tokens only."""
    both = FirstOf(NGram(2), NGram(2, min_ngram=1))
    assert both.narrower == (1,)
    for first, second in ((True, False), (False, True), (False, False)):
        parts = NGram(2, may_abstain=first), NGram(2, may_abstain=second)
        assert not FirstOf(*parts).narrower


@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 3), (2, 4)])
def test_what_is_looked_up_by_definition(least, most):
    """What followed the latest of the longest agreements with the end of the text, up to the end of
    a document, and again from the match where the text ends."""
    rng, drafts, rows, width = np.random.default_rng(0), 4, 256, 16
    proposer = NGram(drafts, max_ngram=most, min_ngram=least)
    assert (proposer.num_nodes, proposer.max_depth) == (drafts + 1, drafts)
    tokens = rng.integers(0, 3, (rows, width + drafts + 1), np.int32)
    tokens[rng.random(tokens.shape) < 0.1] = -1
    length, pending = rng.integers(0, width, rows, np.int32), rng.integers(0, 3, rows, np.int32)
    made = jax.jit(
        lambda state, pending: proposer.propose(None, state, types.SimpleNamespace(pending=pending))
    )(OwnText(tokens, length), pending)[0]
    found = set()
    for row in range(rows):
        end = int(length[row])
        text = [*tokens[row, :end].tolist(), int(pending[row])]
        best, at = 0, -1
        for place in range(end):
            same = 0
            while same < min(most, place + 1) and text[place - same] == text[end - same] >= 0:
                same += 1
            if same >= max(least, best):
                best, at = same, place
        wanted = [text[at + 1 + n % (end - at)] for n in range(drafts)] if best else []
        wanted = wanted[: wanted.index(-1)] if -1 in wanted else wanted
        assert made.tokens[row, : len(wanted) + 1].tolist() == [text[-1], *wanted]
        chain = [n if n < len(wanted) else -1 for n in range(drafts)]
        assert made.parent[row].tolist() == [-1, *chain]
        found.add((best, len(wanted)))
    assert {best for best, _ in found} == {0, *range(least, most + 1)}
    assert {count for _, count in found} == set(range(drafts + 1))


def test_what_a_lookup_refuses():
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match=f"num_drafts={wrong}"):
            NGram(wrong)
