"""`BestFirst`: its tree is the best one, and no draft's presence depends on its own token.

The proposer itself is enumerated: noise is forced so that the children of each parent come in every
order, and each order is weighed by the chance of drawing it.
"""

import dataclasses
import functools
import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import ENUMERATE, Table, continuation, enable_x64, joint, judged_by
from enumeration import prefix as way
from toys import TABLES as toys

from specjax import sampling
from specjax.contract import BlockSource, Context, Corrected, Source
from specjax.methods import MedusaHeads, MedusaSource
from specjax.proposers import (
    BestFirst,
    ChoiceTree,
    CostAware,
    CostAwareParams,
    DynamicTree,
    Survival,
)
from specjax.proposers.combine import cost_aware
from specjax.proposers.shapes import best_first, dynamic_tree
from specjax.types import ABSENT

CALLS = []


@dataclasses.dataclass(frozen=True)
class TableSource(BlockSource):
    """The distribution after each path of drafts is a row of a table.

    With `corrects` a row for each path; otherwise one for each depth. What `correct` is called with
    is kept in `CALLS`, traced. With `corrects` no draft follows the token `last`.
    """

    vocab_size: int
    depth: int
    corrects: bool
    seed: int = 2
    last: int | None = None

    def table(self, path):
        rng = np.random.default_rng([self.seed, *(path if self.corrects else [9] * len(path))])
        return rng.dirichlet(np.full(self.vocab_size, 0.7))

    def rows(self, depth):
        paths = itertools.product(range(self.vocab_size), repeat=depth)
        return jnp.log(jnp.array([self.table(path) for path in paths]))

    def bind(self, target, draft):
        return None

    def init(self, params, prompt, capacity):
        return ()

    def observe(self, params, state, block):
        return state

    def marginals(self, params, state, context):
        rows = jnp.stack([self.rows(depth)[0] for depth in range(self.depth)])
        count = len(context.pending)
        return jnp.broadcast_to(rows, (count, *rows.shape)), jnp.ones(count, bool), state

    def correct(self, params, reading, depth, previous, memory):
        at = jnp.zeros_like(previous) if depth == 0 else memory * self.vocab_size + previous
        CALLS.append((depth, at))
        return Corrected(
            self.rows(depth)[at], at, None if self.last is None else previous != self.last
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Forced:
    """Stands for a draw: the noise of each node is given."""

    gumbel: jax.Array  # [K, V]

    def noise(self, node, depth):
        return self.gumbel[node]


def same(logits, path=None):
    return logits.astype(jnp.float32)


@functools.cache
def compiled(proposer, shared, warp):
    """`propose` as one program, and the depths at which it calls `correct`."""
    depths = []

    @jax.jit
    def call(params, gumbel):
        CALLS.clear()
        pending = jnp.zeros(len(gumbel), jnp.int32)
        context = Context(pending, Forced(gumbel), warp, shared, not shared, None)
        proposal = proposer.propose(params, (), context)[0]
        depths[:] = [depth for depth, _ in CALLS]
        return proposal, [at for _, at in CALLS]

    return call, depths


def propose(proposer, gumbel, shared=False, warp=same, params=None):
    """The proposal after each row of noise; `CALLS` then has arrays."""
    call, depths = compiled(proposer, shared, warp)
    proposal, read = jax.device_get(call(params, np.asarray(gumbel, np.float32)))
    CALLS[:] = zip(depths, read, strict=True)
    return proposal


def chance_of(order, chances):
    """The probability of drawing tokens in this order without replacement."""
    left, product = 1.0, 1.0
    for token in order:
        product *= chances[token] / left
        left -= chances[token]
        if left <= 1e-15:
            break
    return product


def enumerate_proposals(proposer, outer=None, params=None):
    """{parents: {tokens: probability}} of all proposals under independent draws.

    `outer` is a proposer that wraps the `BestFirst`, with its parameters.
    """
    source, size = proposer.source, proposer.source.vocab_size
    orders = list(itertools.permutations(range(size)))
    expanded = [count for count, _ in proposer._levels]
    keys = sum(expanded) if source.corrects else proposer.max_depth
    picks = np.array(list(itertools.product(range(len(orders)), repeat=keys)))
    ranks = np.argsort(np.array(orders), axis=1)  # of each token in an order
    proposal = propose(outer or proposer, -1000.0 * ranks[picks], params=params)
    weight = np.ones(len(picks))
    if not source.corrects:
        assert not CALLS
        paths = [[0] * depth for depth in range(keys)]
        for key, path in enumerate(paths):
            law = np.array([chance_of(order, source.table(path)) for order in orders])
            weight *= law[picks[:, key]]
    else:
        key = 0
        for depth, at in CALLS:
            laws = np.array(
                [
                    [chance_of(order, source.table(path)) for order in orders]
                    for path in itertools.product(range(size), repeat=depth)
                ]
            )
            for column in at.T:
                weight *= laws[column, picks[:, key]]
                key += 1
        assert key == keys
    assert weight.sum() == pytest.approx(1, abs=1e-9)
    cases = {}
    for parent, tokens, chance in zip(proposal.parent, proposal.tokens, weight, strict=True):
        tokens = np.where(np.arange(len(tokens)) > 0, tokens, 0)
        group = cases.setdefault(tuple(parent.tolist()), {})
        tokens = tuple(tokens.tolist())
        group[tokens] = group.get(tokens, 0.0) + chance
    return cases


class Draft:
    """The source as an enumerated draft."""

    def __init__(self, source):
        self.source, self.vocab = source, source.vocab_size

    def __call__(self, prefix):
        depth = min(len(prefix), self.source.depth - 1)  # no draft follows the deepest ones
        return self.source.table(prefix[:depth])


def bias(proposer, cases):
    """How far the emitted text is from the target's distribution, at most."""
    target, draft = Table(proposer.source.vocab_size, 1), Draft(proposer.source)
    length, total = proposer.max_depth + 1, 0.0
    with enable_x64(True):
        for parent, group in cases.items():
            emitted = ENUMERATE["rejection"](parent, list(group.items()), target, draft)
            total = total + joint(emitted, target, length)
    return np.abs(total - continuation(target, (), length)).max()


SMALL = {
    "independent": BestFirst(TableSource(3, 2, False), 6, 3),
    "independent deep": BestFirst(TableSource(3, 3, False), 6, 2),
    "corrected": BestFirst(TableSource(3, 2, True), 6, 3),
    "corrected deep": BestFirst(TableSource(3, 3, True, seed=4), 5, 2),
}


@pytest.mark.parametrize("name", ["independent", "corrected deep"])
def test_rejection_keeps_the_joint_distribution(name):
    """All draws of the proposer are enumerated, with all trees that they lead to."""
    cases = enumerate_proposals(SMALL[name])
    # Without corrections the tree is a function of the text alone.
    assert (len(cases) > 1) == SMALL[name].source.corrects
    assert bias(SMALL[name], cases) < 1e-6  # chances are of float32 logits


@pytest.mark.parametrize("name", ["independent", "corrected"])
def test_values_of_tokens_would_be_biased(name, monkeypatch):
    """If a node counted with the probability of its own token, the text would be wrong."""

    monkeypatch.setattr(best_first, "offer", by_token)
    compiled.cache_clear()
    assert bias(SMALL[name], enumerate_proposals(SMALL[name])) > 0.003
    compiled.cache_clear()


@pytest.mark.parametrize("name", ["independent deep", "corrected"])
def test_leaving_out_what_does_not_pay_keeps_the_joint_distribution(name):
    """`CostAware` under `rejection`, where the trees of other draws have other widths."""
    inner, widths = SMALL[name], (1, 3, SMALL[name].num_nodes)
    outer = CostAware(inner, widths)
    sizes = set()
    for seconds in ([1.0, 1.45, 1.6], [1.0, 1.3, 1.9], [1.0, 1.497, 2.049]):
        cases = enumerate_proposals(inner, outer, CostAwareParams(None, jnp.array(seconds)))
        sizes |= {1 + sum(up != ABSENT for up in parent) for parent in cases}
        assert bias(inner, cases) < 1e-6
    assert len(sizes) > 1


def by_token(logits, warped, noise, width, context):
    """A faulty `offer`: each child counts with the probability of its own token."""
    best = sampling.top_k(sampling.scores(logits, warped, noise), width)[1]
    chances = jax.nn.log_softmax(jnp.broadcast_to(warped, (*best.shape[:2], warped.shape[-1])))
    chances = jnp.take_along_axis(chances, best, axis=-1)
    return chances, chances, best


# --- trees that grow level by level ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class GrowingSource(Source):
    """The distribution after each path is a row of a table; a reading is the path's number."""

    vocab_size: int = 3
    depth: int = 2

    def table(self, path):
        rng = np.random.default_rng([5, *path])
        return rng.dirichlet(np.full(self.vocab_size, 0.7))

    def bind(self, target, draft):
        return None

    def init(self, params, prompt, capacity, lookahead):
        return ()

    def observe(self, params, state, block):
        return state

    def begin(self, params, state, context):
        row = jnp.log(jnp.asarray(self.table(()), jnp.float32))
        return state, (), jnp.broadcast_to(row, (len(context.pending), self.vocab_size))

    def extend(self, params, reading, tokens):
        raise NotImplementedError  # trees call `read_tree`

    def read_tree(self, params, reading, tokens, at, depth, mask):
        rows = jnp.log(jnp.array([self.table((t,)) for t in range(self.vocab_size)], jnp.float32))
        return (), rows[jnp.take_along_axis(tokens, at, axis=1)]

    def end(self, params, state, reading, proposal):
        return state


GROWN = DynamicTree(GrowingSource(), depth=2, width=2, num_nodes=5)
NUMBERS = {"as they are": (1.0, 0.0, 0.0), "sharper": (2.0, -0.4, -0.7), "flat": (0.1, 0.3, -0.1)}
"""What a `Calibrated` proposer may have learned."""


def enumerate_grown(numbers, outer=GROWN, params=None):
    """As `enumerate_proposals`, for `GROWN` with a `Survival` of these numbers.

    Both children of the root are expanded, the first one first.
    """
    source = GROWN.source
    orders = list(itertools.permutations(range(source.vocab_size)))
    picks = np.array(list(itertools.product(range(len(orders)), repeat=3)))
    ranks = np.argsort(np.array(orders), axis=1)
    gumbel = jnp.asarray(-1000.0 * ranks[picks], jnp.float32)
    pending = jnp.zeros(len(picks), jnp.int32)
    learned = Survival.start(jnp.broadcast_to(jnp.array(numbers), (len(picks), 3)))
    context = Context(pending, Forced(gumbel), same, False, True, None, survival=learned.chance)
    made = jax.device_get(jax.jit(lambda: outer.propose(params, (), context)[0])())
    cases = {}
    for pick, parent, tokens in zip(picks, made.parent, made.tokens, strict=True):
        first, *below = (orders[i] for i in pick)
        chance = chance_of(first, source.table(()))
        for child, order in zip(first, below, strict=False):
            chance *= chance_of(order, source.table((child,)))
        group = cases.setdefault(tuple(parent.tolist()), {})
        tokens = tuple(tokens.tolist())
        group[tokens] = group.get(tokens, 0.0) + chance
    return cases


@pytest.mark.parametrize("name", NUMBERS)
def test_a_grown_tree_keeps_the_joint_distribution(name):
    """Its nodes are drawn, and whatever was learned decides which of them are in the tree."""
    cases = enumerate_grown(NUMBERS[name])
    assert sum(sum(group.values()) for group in cases.values()) == pytest.approx(1, abs=1e-6)
    assert bias(GROWN, cases) < 1e-6


@pytest.mark.parametrize("name", NUMBERS)
def test_a_grown_tree_chosen_by_its_own_tokens_would_be_biased(name, monkeypatch):
    def faulty(logits, warped, noise, width, context):
        found, _, best = by_token(logits, warped, noise, width, context)
        return found, context.survival(found), best

    monkeypatch.setattr(dynamic_tree, "offer", faulty)
    assert bias(GROWN, enumerate_grown(NUMBERS[name])) > 0.003


def test_a_grown_tree_of_what_pays_keeps_the_joint_distribution(monkeypatch):
    """A draft is kept before the chances of its descendants are known, which depend on it."""
    outer, sizes = CostAware(GROWN, (1, 3, 5)), set()
    for seconds in ([1.0, 2.4, 2.52], [1.0, 2.5, 2.6]):
        params = CostAwareParams(None, jnp.array(seconds))
        cases = enumerate_grown(NUMBERS["sharper"], outer, params)
        sizes |= {1 + sum(up != ABSENT for up in parent) for parent in cases}
        assert bias(GROWN, cases) < 1e-6
    assert len(sizes) > 1

    def best(best, gained, widths, seconds):
        return jnp.argmax(gained / seconds, axis=1)

    monkeypatch.setattr(cost_aware, "_first_that_stops", best)
    assert bias(GROWN, enumerate_grown(NUMBERS["sharper"], outer, params)) > 0.003


def test_chains_only_is_refused():
    """Its trees are no chains, so `block` is refused before any compilation."""
    assert "best first" not in judged_by("block", ("best first",))
    with pytest.raises(ValueError, match="judges chains only, and BestFirst proposes trees"):
        toys.decoder("best first", "block")


# --- which tree -----------------------------------------------------------------------------------


def best_paths(chances, count, width):
    """The `count` most probable paths, found with a heap; `chances(path)` is a row."""
    heap, found = [(-1.0, ())], []
    while heap and len(found) < count:
        value, path = heapq.heappop(heap)
        found.append(path)
        row = chances(path)
        for token in [] if row is None else np.argsort(-row)[:width]:
            heapq.heappush(heap, (value * row[token], (*path, int(token))))
    return found


def paths_of(parent, tokens):
    return [way(parent, tokens, node) for node in range(len(parent))]


def present_paths(proposal):
    """The paths of the nodes of the first row, without absent ones."""
    parent, tokens = proposal.parent[0], proposal.tokens[0]
    return {way(parent, tokens, node) for node in [0, *np.flatnonzero(parent != ABSENT)]}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("width", [2, 5])
def test_the_tree_has_the_most_probable_paths(width, shared):
    """As a search with a heap finds them. Without noise both kinds of draws agree."""
    source = TableSource(5, 4, False)
    proposer = BestFirst(source, 11, width)
    proposal = propose(proposer, np.zeros((1, 4, 5)), shared)

    def chances(path):
        return source.table(path) if len(path) < 4 else None

    wanted = best_paths(chances, 11, width)
    assert set(paths_of(proposal.parent[0], proposal.tokens[0])) == set(wanted)


@pytest.mark.parametrize("shared", [True, False])
def test_corrections_follow_each_path(shared):
    """Where no node is left out for the width, the tree is that of the heap; and each node has the
    distribution that its children were drawn from."""
    source = TableSource(3, 3, True, seed=4)
    proposer = BestFirst(source, 5, 3)
    proposal = propose(proposer, np.zeros((1, 16, 3)), shared)

    def chances(path):
        return source.table(path) if len(path) < 3 else None

    found = paths_of(proposal.parent[0], proposal.tokens[0])
    assert set(found) == set(best_paths(chances, 5, 3))
    if not shared:
        inner = {int(up) for up in proposal.parent[0] if up >= 0}
        for node in inner:
            row = jax.nn.softmax(proposal.logits[0, node])
            np.testing.assert_allclose(row, source.table(found[node]), atol=1e-6)


@pytest.mark.parametrize("last", [0, 1, 2])
def test_no_draft_follows_where_the_source_ends(last):
    """Where a source says that a path does not go on, the tree is that of the heap without what
    would follow. The pending token is 0."""
    source = TableSource(3, 3, True, seed=4, last=last)
    proposal = propose(BestFirst(source, 5, 3), np.zeros((1, 16, 3)), True)

    def chances(path):
        return source.table(path) if len(path) < 3 and (0, *path)[-1] != last else None

    assert present_paths(proposal) == set(best_paths(chances, 5, 3))


@pytest.mark.parametrize("last", [0, 1, 2])
def test_no_choice_follows_where_the_source_ends(last):
    """Nodes of a tree of choices whose path holds the token `last`, the pending 0 included, have no
    children."""
    source, choices = TableSource(3, 2, True, last=last), ((0,), (1,), (2,), (0, 0), (1, 0), (2, 0))
    proposal = propose(ChoiceTree(source, choices), np.zeros((1, 7, 3)), True)
    first = set() if last == 0 else {(0,), (1,), (2,)}
    below = {(*path, int(np.argmax(source.table(path)))) for path in first if path != (last,)}
    assert present_paths(proposal) == {(), *first, *below}


@pytest.mark.parametrize("tree", [BestFirst, ChoiceTree])
def test_processors_know_the_path_of_each_node(tree):
    """Where each token of a path is forbidden after it, no path has a token twice."""

    def once(logits, path=None):
        said = (path[..., None] == jnp.arange(logits.shape[-1])).any(-2)
        return jnp.where(said, -jnp.inf, logits)

    source = TableSource(3, 3, True, seed=4)
    proposer = BestFirst(source, 10, 3) if tree is BestFirst else ChoiceTree(source)
    paths = present_paths(propose(proposer, np.zeros((1, 16, 3)), True, warp=once))
    assert max(map(len, paths)) == 3
    assert all(len(set(path)) == len(path) for path in paths)


def test_no_more_nodes_get_children_than_are_proposed():
    """Of a depth at most all nodes but the root are proposed, and others are not read."""
    call, _ = compiled(BestFirst(TableSource(6, 3, True), 4, 6), False, same)
    _, read = call.eval_shape(None, jnp.zeros((2, 16, 6)))
    assert [at.shape for at in read] == [(2, 1), (2, 3), (2, 3)]


def test_choices_below_corrections_have_the_distribution_of_their_path():
    """Each node of a tree of choices has the distribution that its children were drawn from."""
    source = TableSource(3, 3, True)
    choices = ((0,), (1,), (2,), (0, 0), (1, 0), (2, 0), (0, 0, 0), (1, 0, 0), (2, 0, 0), (2, 0, 1))
    noise = np.random.default_rng(0).gumbel(size=(4, len(choices) + 1, 3))
    proposal = propose(ChoiceTree(source, choices), noise)
    for parent, tokens, logits in zip(
        proposal.parent, proposal.tokens, proposal.logits, strict=True
    ):
        for node in set(parent[1:].tolist()):
            wanted = source.table(way(parent, tokens, node))
            np.testing.assert_allclose(jax.nn.softmax(logits[node]), wanted, atol=1e-6)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("corrects", [True, False])
def test_greedy_siblings_are_the_best_tokens(corrects, shared):
    """At temperature 0 the tree is that of the unfiltered probabilities, whatever the noise."""

    def greedy(logits, path=None):
        return sampling.warp(logits, sampling.Sampling.create(len(logits), 0.0))

    proposer = BestFirst(TableSource(4, 3, corrects, seed=6), 7, 3)
    noise = np.random.default_rng(0).gumbel(size=(1, 20, 4))
    plain = propose(proposer, np.zeros((1, 20, 4)), shared)
    drawn = propose(proposer, noise, shared, warp=greedy)
    np.testing.assert_array_equal(drawn.tokens, plain.tokens)
    np.testing.assert_array_equal(drawn.parent, plain.parent)


def test_a_tree_without_enough_tokens_has_absent_nodes():
    """Tokens of probability 0 are not drafted, and neither is what would follow them."""

    class Two(TableSource):
        def rows(self, depth):
            return jnp.where(jnp.arange(self.vocab_size) < 2, super().rows(depth), -jnp.inf)

    proposal = propose(BestFirst(Two(5, 2, False), 9, 4), np.zeros((1, 2, 5)), True)
    present = proposal.parent[0] != ABSENT
    assert present.sum() == 2 + 4
    assert (proposal.tokens[0][present] < 2).all()


def test_what_does_not_fit_is_refused():
    """Each message names the value, and the cure."""
    heads = MedusaSource(MedusaHeads(num_heads=2, hidden_size=8, vocab_size=9))

    for message, arguments in {
        r"num_nodes=1; it must be at least 2, since it counts the root": (heads, 1),
        r"width=10; it must lie in \[1, 9\]": (heads, 4, 10),
        r"num_nodes=8; .* 2 drafts a block and width=2 make 7 candidates": (
            heads,
            8,
            2,
        ),
        r"source=<a Chain>; pass a block source": (toys.CASES["draft 3"][0], 4),
    }.items():
        with pytest.raises(ValueError, match=message):
            BestFirst(*arguments)
