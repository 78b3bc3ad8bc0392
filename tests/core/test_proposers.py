"""What the proposers draft, against drafting without caches, masks and batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trees
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
    Sampling,
    Universal,
    warp,
)
from specjax.proposers import (
    Chain,
    ChoiceTree,
    DraftSource,
    EarlyExitSource,
    MedusaSource,
    StaticTree,
    TranslatedSource,
)

NET = toys.model(num_layers=1)
STEPS = 4
TEMPERATURE = [1.0, 0.0, 0.7, 1.0]


@functools.cache
def steps(case, rule, modulus=toys.VOCAB):
    """The first steps of a case: the state before each, and the proposal. A small `modulus`
    makes prompts repeat."""
    dec, arrays = toys.decoder(case, rule), toys.params(case)
    step, taken = jax.jit(dec.step), []
    state = toys.prefill(dec, arrays, temperature=TEMPERATURE, prompt=toys.PROMPTS % modulus)
    for _ in range(STEPS):
        after, info = step(arrays, state)
        taken.append((state, jax.device_get(info.proposal)))
        state = after
    return taken


def logits_after(text):
    """[V] of the small draft (the target without its last layer) after a text, in a plain pass."""
    padded = np.zeros((1, 64), np.int32)
    padded[0, : len(text)] = text
    return plain(padded.tobytes())[len(text) - 1]


@functools.cache
def plain(tokens):
    return toys.plain_logits(np.frombuffer(tokens, np.int32)[None], NET, toys.truncated())[0]


@functools.cache
def warped(logits, temperature):
    logits = np.frombuffer(logits, np.float32)[None, None]
    return np.asarray(jax.jit(warp)(logits, Sampling.create(1, temperature)))[0, 0]


@functools.partial(jax.jit, static_argnums=0)
def drawn(dec, state):
    return dec._draw(state)


def noise(state, rule, row, node, depth):
    """[V]: the noise with which the children of a node are drawn."""
    draw = drawn(toys.decoder("none", rule), state)
    if not RULES[rule].shared_noise:
        at = jnp.array([node]), jnp.array([depth])
        return np.asarray(jax.tree.map(lambda x: x[row], draw).noise(*at)[0])
    key = jax.random.fold_in(state.key[row], int(state.length[row]) - 1 + depth + 1)
    return np.asarray(jax.random.gumbel(key, (toys.VOCAB,), jnp.float32))


def ranked(state, rule, row, path, node, temperature):
    """The tokens that may follow a path, best first, and the scores of all tokens."""
    text = [*np.asarray(state.tokens[row, : state.length[row]]), *path]
    raw = logits_after(text)
    if temperature == 0:
        return np.argsort(-raw, kind="stable"), raw
    scores = warped(raw.tobytes(), temperature) + noise(state, rule, row, node, len(path))
    return np.argsort(-scores, kind="stable"), scores


CONTRACTS = [
    ("draft 6", "match"),
    ("draft tree", "match"),
    ("draft tree", "rejection"),
    ("dynamic tree", "match"),
    ("dynamic tree", "rejection"),
    ("early exit", "match"),
    ("early exit tree", "rejection"),
    ("early exit dynamic tree", "match"),
    ("translated tree", "match"),
    ("translated dynamic tree", "rejection"),
]


@pytest.mark.parametrize(("case", "rule"), CONTRACTS)
def test_proposals_are_trees_of_distinct_siblings(case, rule):
    """Proposals are in topological order below a pending root, without orphans, excess depth or
    equal siblings."""
    proposer, there = toys.CASES[case][0], 0
    for state, proposal in steps(case, rule):
        for row in range(toys.ROWS):
            tokens, parent = proposal.tokens[row], proposal.parent[row]
            assert len(tokens) == len(parent) == proposer.num_nodes
            assert parent[0] == -1
            assert tokens[0] == state.tokens[row, state.length[row] - 1]
            nodes = [n for n in range(len(parent)) if parent[n] >= 0]
            assert all(parent[n] < n and (parent[n] == 0 or parent[parent[n]] >= 0) for n in nodes)
            assert all(len(trees.ancestors(parent, n)) - 1 <= proposer.max_depth for n in nodes)
            pairs = [(parent[n], tokens[n]) for n in nodes]
            assert len(set(pairs)) == len(pairs)
            there += len(nodes)
    assert there > STEPS * toys.ROWS // 2


def test_a_static_tree_has_its_shape():
    """(3, 2, 1) has levels of 3, 6 and 6 nodes below the root, siblings side by side."""
    proposer = DraftTree(NET, toys.VOCAB, [3, 2, 1])
    assert proposer == DraftTree(NET, toys.VOCAB, (3, 2, 1))
    assert hash(proposer) == hash(DraftTree(NET, toys.VOCAB, (3, 2, 1)))
    assert (proposer.num_nodes, proposer.max_depth) == (16, 3)
    assert proposer.parent.tolist() == [-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("rule", toys.NOISE_KINDS)
@pytest.mark.parametrize("case", ["draft tree", "early exit tree"])
def test_siblings_of_a_static_tree_are_the_best_with_the_noise(case, rule):
    """Children are the top-k of logits + noise after the node's path, and the proposal has their
    distribution.

    The early exit drafts what a model of the target's first layer drafts.
    """
    proposer = toys.CASES[case][0]
    for state, proposal in steps(case, rule):
        for row in range(toys.ROWS):
            parent, tokens = proposal.parent[row], proposal.tokens[row]
            assert parent.tolist() == proposer.parent.tolist()
            for node in range(proposer.num_nodes):
                children = np.flatnonzero(parent == node)
                if len(children) == 0:
                    continue
                path = tokens[trees.ancestors(parent, node)[1:]]
                best, _ = ranked(state, rule, row, path, node, TEMPERATURE[row])
                assert tokens[children].tolist() == best[: len(children)].tolist()
                if proposal.logits is not None:
                    raw = logits_after([*np.asarray(state.tokens[row, : state.length[row]]), *path])
                    wanted = warped(raw.tobytes(), TEMPERATURE[row])
                    np.testing.assert_allclose(
                        proposal.logits[row, node], wanted, rtol=1e-4, atol=1e-4
                    )
    assert (proposal.logits is None) == RULES[rule].shared_noise
    assert not proposal.point_mass


@pytest.mark.parametrize("rule", toys.NOISE_KINDS)
@pytest.mark.parametrize("case", ["dynamic tree", "early exit dynamic tree"])
def test_a_dynamic_tree_is_expanded_and_reranked(case, rule):
    """EAGLE-2 by hand: the best nodes of a level are expanded, and the best of all candidates
    are proposed."""
    proposer, shapes = toys.CASES[case][0], set()
    for state, proposal in steps(case, rule):
        assert proposal.logits is None
        assert proposal.point_mass == (
            not RULES[rule].shared_noise
        )  # drafts selected without noise are point masses
        for row in range(toys.ROWS):

            def children(path, value, row=row, state=state):
                best, scores = ranked(state, "match", row, path, 0, TEMPERATURE[row])
                if TEMPERATURE[row] > 0 and not RULES[rule].shared_noise:
                    text = [*np.asarray(state.tokens[row, : state.length[row]]), *path]
                    scores = warped(logits_after(text).tobytes(), TEMPERATURE[row])
                    best = np.argsort(-scores, kind="stable")
                chance = np.asarray(jax.nn.log_softmax(scores))
                return [
                    (value + chance[token], (*path, int(token))) for token in best[: proposer.width]
                ]

            level, candidates = [(0.0, ())], []
            for _ in range(proposer.depth):
                new = [child for value, path in level for child in children(path, value)]
                candidates += new
                level = sorted(new, reverse=True)[: proposer.width]
            wanted = {
                path for _, path in sorted(candidates, reverse=True)[: proposer.num_nodes - 1]
            }
            parent, tokens = proposal.parent[row], proposal.tokens[row]
            ways = [trees.ancestors(parent, n)[1:] for n in range(1, proposer.num_nodes)]
            assert {tuple(tokens[way].tolist()) for way in ways} == wanted
            shapes.add(tuple(parent.tolist()))
    assert len(shapes) > 2 or (case == "early exit dynamic tree" and len(shapes) == 2)


@pytest.mark.parametrize(("case", "threshold"), [("draft 6", 0.3), ("early exit", 0.0)])
def test_a_chain_is_drawn_until_the_model_is_unsure(case, threshold):
    """Each draft is drawn after the drafts before it; none follow the first one below the
    threshold.

    The early exit drafts what a model of the target's first layer drafts.
    """
    lengths = set()
    for state, proposal in steps(case, "match"):
        for row in range(toys.ROWS):
            path = []
            for node in range(1, proposal.tokens.shape[1]):
                assert proposal.parent[row, node] == node - 1
                best, _ = ranked(state, "match", row, path, node - 1, TEMPERATURE[row])
                assert proposal.tokens[row, node] == best[0]
                raw = logits_after([*np.asarray(state.tokens[row, : state.length[row]]), *path])
                path.append(int(best[0]))
                if np.asarray(jax.nn.softmax(raw))[best[0]] < threshold:
                    break
            assert (proposal.parent[row, len(path) + 1 :] == -1).all()
            lengths.add(len(path))
    assert len(lengths) > 1 if threshold else lengths == {3}


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
    for state, proposal in steps("first of", "rejection", 3):
        text = state.tokens[:, : toys.CAPACITY + proposer.num_nodes]
        look_up = jax.vmap(proposer.first._look_up)
        pending = state.tokens[jnp.arange(toys.ROWS), state.length - 1]
        copied, parent = look_up(text, state.length - 1, pending)
        for row in range(toys.ROWS):
            matched = bool((parent[row] >= 0).any())
            chosen[matched] += 1
            tokens, chances = proposal.tokens[row], np.asarray(jax.nn.softmax(proposal.logits[row]))
            assert proposal.parent[row].tolist() == [-1, 0, 1, 2]
            if matched:
                assert tokens.tolist() == copied[row].tolist()
                assert chances[np.arange(3), tokens[1:]].tolist() == [1, 1, 1]
            else:
                best, _ = ranked(state, "rejection", row, [], 0, TEMPERATURE[row])
                assert tokens[1] == best[0]
    assert min(chosen.values()) > 1


@pytest.mark.parametrize(
    "case",
    ["draft 3", "draft tree", "dynamic tree", "early exit", "early exit tree", "first of", "ngram"],
)
def test_a_row_bounds_its_own_drafts(case):
    """The text and program are the same; a row with 0 drafts decodes plainly and is counted so."""
    bounds = np.array([3, 0, 1, 2], np.int32)
    dec, arrays = toys.decoder(case, "match"), toys.params(case)
    state = dec.run(arrays, toys.prefill(dec, arrays, temperature=1.0, num_drafts=bounds))
    texts, free = toys.decoded(case, "match", 1.0)
    assert toys.texts(state) == texts
    passes, stats = np.asarray(state.stats.target_passes), state.stats
    assert passes[0] == free.stats.target_passes[0]
    assert passes[1] == stats.emitted[1] == 20 - toys.LENGTHS[1]
    assert [int(x[1]) for x in (stats.proposed, stats.tested, stats.accepted)] == [0, 0, 0]
    assert (np.asarray(stats.accepted) <= passes * bounds).all()
    assert (np.asarray(stats.tested) <= passes * bounds).all()
    assert 0 < stats.accepted[2] <= passes[2] < free.stats.emitted[2]
    if case == "draft 3":
        assert stats.proposed.tolist() == (passes * bounds).tolist()
    if case == "draft tree":
        assert stats.proposed.tolist() == (passes * np.array([12, 0, 3, 6])).tolist()


def test_short_forms_are_shapes_over_sources():
    """The common combinations have a name each, which takes the options of the shape and of the
    source."""
    heads, other = toys.OWN, toys.model(toys.OTHER_VOCAB)
    assert DraftModel(NET, toys.VOCAB, 3, 0.2) == Chain(DraftSource(NET, toys.VOCAB), 3, 0.2)
    assert DraftTree(NET, toys.VOCAB, (2, 2)) == StaticTree(DraftSource(NET, toys.VOCAB), (2, 2))
    assert EarlyExit(toys.model(), 1, 3, 0.2) == Chain(EarlyExitSource(toys.model(), 1), 3, 0.2)
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


def test_two_proposers_that_may_abstain():
    """If no row has a draft of either, the target reads the pending tokens only."""
    both = FirstOf(NGram(2), NGram(2, min_ngram=1))
    assert both.narrower == (1,)
    for first, second in ((True, False), (False, True), (False, False)):
        parts = NGram(2, may_abstain=first), NGram(2, may_abstain=second)
        assert not FirstOf(*parts).narrower
