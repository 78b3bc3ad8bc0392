"""Exact rules keep the target's distribution: no sampling here, every outcome is enumerated with its probability.

The vocabulary has three or four tokens, and target and draft are tables: a random distribution after every prefix.  A
proposal's tokens are enumerated as well, with the probability of drawing them.  What a rule emits is continued by the
target to a fixed length, and the whole joint distribution is compared.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from specjax import RULES, Match, Proposal, Threshold, Typical
from specjax.rules import block, rejection

try:
    from jax import enable_x64
except ImportError:  # before JAX 0.8
    from jax.experimental import enable_x64

SHAPES = {
    "root alone": (4, (-1,)),
    "chain of 1": (4, (-1, 0)),
    "chain of 3": (3, (-1, 0, 1, 2)),
    "2 siblings": (4, (-1, 0, 0)),
    "3 siblings": (4, (-1, 0, 0, 0)),
    "all siblings": (4, (-1, 0, 0, 0, 0)),
    "breadth first": (3, (-1, 0, 0, 1, 2)),
    "depth first": (3, (-1, 0, 1, 0, 3)),
    "siblings below": (3, (-1, 0, 0, 1, 1)),
    "absent node": (4, (-1, 0, -1, 1)),
    "absent between siblings": (3, (-1, 0, -1, 0, 3)),
    "absent end": (3, (-1, 0, 1, -1)),
    "absent start": (3, (-1, -1, 1, 2)),
}
CHAINS = [name for name, (_, parent) in SHAPES.items() if all(up in (n - 1, -1) for n, up in enumerate(parent))]


def judged_by(rule, shapes=tuple(SHAPES)):
    """Those of the shapes that `rule` can judge."""
    return [shape for shape in shapes if shape in CHAINS or not getattr(RULES[rule], "chain_only", False)]


class Table:
    """A random distribution after every prefix."""

    def __init__(self, vocab, seed):
        self.vocab, self.rng, self.rows = vocab, np.random.default_rng(seed), {}

    def __call__(self, prefix):
        if prefix not in self.rows:
            self.rows[prefix] = self.rng.dirichlet(np.full(self.vocab, 0.7))
        return self.rows[prefix]


class GreedyTable(Table):
    """Temperature 0: one-hot rows."""

    def __call__(self, prefix):
        row = super().__call__(prefix)
        return (row == row.max()).astype(float)


class SparseTable(Table):
    """As after top-k: one token is left out."""

    def __call__(self, prefix):
        row = super().__call__(prefix)
        return np.where(row == row.min(), 0, row) / (1 - row.min())


def prefix(parent, tokens, node):
    """The tokens that were read when the walk stands at `node`, the root's not counted."""
    return tuple(int(tokens[n]) for n in toys.ancestors(parent, node)[1:])


def drawn(parent, draft):
    """Every way to draw the tokens of a tree from `draft`, siblings without replacement: (tokens, probability)."""

    def extend(tokens, chance):
        n = len(tokens)
        if n == len(parent):
            yield tuple(tokens), chance
            return
        if parent[n] < 0:
            yield from extend([*tokens, 0], chance)
            return
        left = draft(prefix(parent, tokens, parent[n])).copy()
        left[[tokens[m] for m in range(1, n) if parent[m] == parent[n]]] = 0
        if left.sum() == 0:  # nothing is left to draw: what stands there has no draft mass, and must not matter
            yield from extend([*tokens, n % draft.vocab], chance)
            return
        for token in np.flatnonzero(left):
            yield from extend([*tokens, int(token)], chance * left[token] / left.sum())

    yield from extend([0], 1.0)


def best(parent, draft):
    """The one tree that an argmax draft makes: siblings are its best tokens in order."""
    tokens = [0]
    for n in range(1, len(parent)):
        rank = sum(parent[m] == parent[n] for m in range(1, n))
        row = draft(prefix(parent, tokens, max(parent[n], 0)))
        tokens.append(int(np.argsort(-row, kind="stable")[rank]) if parent[n] >= 0 else 0)
    yield tuple(tokens), 1.0


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """Emissions and their probabilities, one a row."""

    chance: np.ndarray
    accepted: np.ndarray  # [M, D] tokens
    num_accepted: np.ndarray
    next_token: np.ndarray


def rows_of(parent, proposals, table):
    """[M, N, V] of a table after each node of each proposal."""
    return np.array([[table(prefix(parent, tokens, n)) for n in range(len(parent))] for tokens in proposals])


@functools.partial(jax.jit, static_argnums=(0, 1))
def judge(rule, parent, draw, tokens, target, draft):
    """What `rule` says of every case: tokens on its path, how many it accepts, and the next token."""
    max_depth = max(len(toys.ancestors(parent, n)) - 1 for n in range(len(parent)))

    def one(draw, tokens, target, draft):
        logits = None if draft is None else jnp.log(draft)
        proposal = Proposal(tokens, jnp.array(parent, jnp.int32), logits)
        verdict = rule(draw, proposal, jnp.log(target), max_depth)
        return tokens[verdict.path], verdict.num_accepted, verdict.next_token

    return jax.vmap(one)(draw, tokens, target, draft)


def weigh(uniform, proposal, target, draft):
    """`block.weigh` in the words of `rejection.walk`."""
    chance, residual = block.weigh(proposal, target, draft)
    node = jnp.max(jnp.where(uniform < chance, jnp.arange(len(chance)), 0))
    return node, residual[node] / residual[node].sum(), chance.at[0].set(1)


WALKS = {"rejection": rejection.walk, "block": weigh}


@functools.partial(jax.jit, static_argnums=(0, 1))
def walk_all(rule, parent, uniform, tokens, target, draft):
    def one(uniform, tokens, target, draft):
        return WALKS[rule](uniform, Proposal(tokens, jnp.array(parent, jnp.int32), None), target, draft)

    return jax.vmap(one)(uniform, tokens, target, draft)


def in_buckets(function, *cases):
    """`function` of all cases, their number padded to a power of four: few sizes compile for all the tests."""
    count = len(cases[1])
    size = 256
    while size < count:
        size *= 4
    padded = jax.tree.map(lambda x: np.pad(x, [(0, size - count)] + [(0, 0)] * (x.ndim - 1), mode="edge"), cases)
    return [np.asarray(x)[:count] for x in function(*padded)]


def outcomes(rule, parent, draw, chance, tokens, target, draft):
    """Run `rule` on all cases at once: `draw` [M, ...], `tokens` [M, N], probabilities [M, N, V]."""
    path, accepted, token = in_buckets(functools.partial(judge, rule, parent), draw, tokens, target, draft)
    return Outcomes(np.asarray(chance), path[:, 1:], accepted, token)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class ForcedUniform:
    """Stands for `IndependentDraw`: acceptance draws and the next token are given."""

    uniform: jax.Array
    token: jax.Array
    size: int = dataclasses.field(metadata={"static": True})

    def acceptance(self, num_nodes):
        return self.uniform

    def residual(self):
        return jnp.where(jnp.arange(self.size) == self.token, 1e9, 0.0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class ForcedTokens:
    """Stands for `SharedDraw`: the target's own draw after each node is given."""

    tokens: jax.Array
    size: int = dataclasses.field(metadata={"static": True})

    def noise(self, node, depth):
        return jnp.where(jnp.arange(self.size) == self.tokens[node], 1e9, 0.0)


def enumerate_acceptance(rule, parent, proposals, target, draft):
    """Every pattern of accepting and refusing, weighed by the walk's chances, and every token of the residual."""
    vocab, nodes = target.vocab, len(parent)
    tokens, weight = (np.array(x) for x in zip(*proposals, strict=True))
    # A uniform of 0 accepts whatever can be accepted, and 1 refuses whatever can be refused.
    patterns = np.array([(0, *p) for p in itertools.product((0.0, 1.0), repeat=nodes - 1)])
    pick = np.array(list(itertools.product(range(len(tokens)), range(len(patterns)))))
    tokens, weight, uniform = tokens[pick[:, 0]], weight[pick[:, 0]], patterns[pick[:, 1]]
    p = rows_of(parent, tokens, target)
    q = None if draft is None else rows_of(parent, tokens, draft)
    _, residual, chance = in_buckets(functools.partial(walk_all, rule, parent), uniform, tokens, p, q)
    weight = weight * np.where(uniform == 0, chance, 1 - chance).prod(1)
    np.testing.assert_allclose(residual.sum(1), 1, atol=1e-12)
    live = np.flatnonzero(weight)
    case, token = np.repeat(live, vocab), np.tile(np.arange(vocab), len(live))
    weight = weight[case] * residual[case, token]
    case, token, weight = case[weight > 0], token[weight > 0], weight[weight > 0]
    draw = ForcedUniform(uniform[case], token, vocab)
    return outcomes(RULES[rule](), parent, draw, weight, tokens[case], p[case], None if q is None else q[case])


def enumerate_match(parent, proposals, target, draft):
    """Every draw of the target at every node."""
    vocab, nodes = target.vocab, len(parent)
    tokens, weight = (np.array(x) for x in zip(*proposals, strict=True))
    wanted = np.array(list(itertools.product(range(vocab), repeat=nodes)))
    pick = np.array(list(itertools.product(range(len(tokens)), range(len(wanted)))))
    tokens, weight, wanted = tokens[pick[:, 0]], weight[pick[:, 0]], wanted[pick[:, 1]]
    p = rows_of(parent, tokens, target)
    weight = weight * np.take_along_axis(p, wanted[:, :, None], axis=2)[:, :, 0].prod(1)
    live = weight > 0
    draw = ForcedTokens(wanted[live], vocab)
    q = None if draft is None else rows_of(parent, tokens[live], draft)
    return outcomes(Match(), parent, draw, weight[live], tokens[live], p[live], q)


ENUMERATE = {"match": enumerate_match, **{rule: functools.partial(enumerate_acceptance, rule) for rule in WALKS}}


def joint(found, target, length):
    """[V] * length: the distribution of the text when the target continues each emission."""
    total = np.zeros((target.vocab,) * length)
    emissions = {}
    for chance, accepted, count, token in zip(
        found.chance, found.accepted, found.num_accepted, found.next_token, strict=True
    ):
        text = (*accepted[:count].tolist(), int(token))
        emissions[text] = emissions.get(text, 0.0) + chance
    for text, chance in emissions.items():
        block = np.array(chance)
        total[text] += block * continuation(target, text, length - len(text))
    return total


def continuation(target, text, more):
    """[V] * more: the target's joint distribution of the next `more` tokens."""
    if more == 0:
        return np.array(1.0)
    parts = [p * continuation(target, (*text, v), more - 1) for v, p in enumerate(target(text))]
    return np.stack(parts)


def check(rule, parent, proposals, target, draft):
    with enable_x64(True):
        found = ENUMERATE[rule](parent, list(proposals), target, draft)
    length = found.accepted.shape[1] + 1
    np.testing.assert_allclose(joint(found, target, length), continuation(target, (), length), rtol=0, atol=1e-12)
    return found


@functools.cache
def tables(vocab):
    return Table(vocab, 1), Table(vocab, 2)


def test_every_exact_rule_is_enumerated():
    """A rule that claims to be exact has a case here."""
    assert set(ENUMERATE) == {name for name, rule in RULES.items() if rule.exact}


@pytest.mark.parametrize(("rule", "shape"), [(rule, shape) for rule in ENUMERATE for shape in judged_by(rule)])
def test_drawn_guesses_keep_the_joint_distribution(rule, shape):
    """Guesses drawn from the draft, siblings without replacement: the emitted text is the target's."""
    vocab, parent = SHAPES[shape]
    target, draft = tables(vocab)
    found = check(rule, parent, drawn(parent, draft), target, draft)
    ways = [toys.ancestors(parent, n) for n in range(len(parent))]
    assert found.num_accepted.max() == max(len(way) - 1 for way in ways if way[0] == 0)


@pytest.mark.parametrize(("rule", "shape"), [(rule, shape) for rule in ENUMERATE for shape in judged_by(rule)])
def test_fixed_guesses_keep_the_joint_distribution(rule, shape):
    """The draft's best tokens as point masses: the emitted text is the target's."""
    vocab, parent = SHAPES[shape]
    target, draft = tables(vocab)
    check(rule, parent, best(parent, draft), target, None)


@pytest.mark.parametrize("draft", [SparseTable, GreedyTable])
@pytest.mark.parametrize("target", [Table, SparseTable, GreedyTable])
@pytest.mark.parametrize(
    ("rule", "shape"),
    [(rule, shape) for rule in ENUMERATE for shape in judged_by(rule, ("2 siblings", "breadth first", "chain of 3"))],
)
def test_rows_with_zeros_keep_the_joint_distribution(rule, target, draft, shape):
    """Filtered and one-hot rows, on either side: tokens without mass, in target, draft or both, do no harm."""
    vocab, parent = SHAPES[shape]
    target, draft = target(vocab, 1), draft(vocab, 2)
    check(rule, parent, drawn(parent, draft), target, draft)


@pytest.mark.parametrize("rule", ENUMERATE)
def test_a_perfect_draft_keeps_the_joint_distribution(rule):
    """Where draft and target agree the first refused mass is zero: nothing becomes NaN, nothing is biased."""
    vocab, parent = SHAPES[judged_by(rule, ("breadth first", "chain of 3"))[0]]
    target = Table(vocab, 1)
    check(rule, parent, drawn(parent, target), target, target)


@pytest.mark.parametrize("rule", [rule for rule in ENUMERATE if judged_by(rule, ("2 siblings",))])
def test_repeated_point_masses_keep_the_joint_distribution(rule):
    """The same guess twice below one parent is no second chance."""
    target, _ = tables(4)
    for tokens in ((0, 2, 2), (0, 1, 1)):
        check(rule, (-1, 0, 0), [(tokens, 1.0)], target, None)


def stopped(draft, threshold, first):
    """Chains of up to 2 draws, by how many are left when a chain ends at the place `first` of the first unlikely one:
    0 drops the unlikely draw itself, 1 what follows it."""
    found = {0: [], 1: [], 2: []}
    for tokens, chance in drawn((-1, 0, 1), draft):
        likely = [draft(tokens[1:n])[tokens[n]] >= threshold for n in (1, 2)]
        found[min(likely.index(False) + first, 2) if False in likely else 2].append((tokens, chance))
    return {(-1, *range(count), *[-1] * (2 - count)): cases for count, cases in found.items() if cases}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("rule", ENUMERATE)
def test_a_chain_may_end_behind_an_unlikely_guess_but_not_before(rule, first):
    """A guess that is made or not for what was drawn before it is exact; dropped for its own outcome it is biased.

    But for a rule with shared noise, to which no proposal matters.
    """
    target, draft = tables(4)
    with enable_x64(True):
        parts = [ENUMERATE[rule](p, cases, target, draft) for p, cases in stopped(draft, 0.3, first).items()]
    wrong = np.abs(sum(joint(part, target, 3) for part in parts) - continuation(target, (), 3)).max()
    assert len(parts) >= 2
    assert wrong > 0.01 if first == 0 and not RULES[rule].shared_noise else wrong < 1e-12


def test_rejection_accepts_as_much_as_possible_on_a_chain():
    """The first guess is accepted with probability 1 - TV(target, draft): sum of min(p, q)."""
    target, draft = tables(4)
    found = check("rejection", (-1, 0), drawn((-1, 0), draft), target, draft)
    accepted = found.chance[found.num_accepted == 1].sum()
    assert accepted == pytest.approx(np.minimum(target(()), draft(())).sum(), abs=1e-12)


@pytest.mark.parametrize("draft", [Table, SparseTable, GreedyTable, None])
@pytest.mark.parametrize("shape", CHAINS)
def test_block_accepts_no_fewer_than_rejection(shape, draft):
    """On average over a chain; as many where there is but one guess, and more where guesses can make up for others."""
    vocab, parent = SHAPES[shape]
    target, table = Table(vocab, 1), (draft or Table)(vocab, 2)
    proposals = list(drawn(parent, table) if draft else best(parent, table))
    with enable_x64(True):
        found = {rule: ENUMERATE[rule](parent, proposals, target, table if draft else None) for rule in WALKS}
    accepted = {rule: (outcome.chance * outcome.num_accepted).sum() for rule, outcome in found.items()}
    if shape == "chain of 3" and draft in (Table, SparseTable):
        assert accepted["block"] > accepted["rejection"] + 0.01
    else:
        assert accepted["block"] >= accepted["rejection"] - 1e-12
    if shape == "chain of 1":
        assert accepted["block"] == pytest.approx(accepted["rejection"], abs=1e-12)


def test_match_emits_the_draw_of_the_target_whatever_is_proposed():
    """Not only in distribution: for each noise and every tree at all, the text is the target's own draws."""
    vocab, parent = SHAPES["siblings below"]
    proposals = [((0, *tokens), 1.0) for tokens in itertools.product(range(vocab), repeat=4)]
    wanted = np.array(list(itertools.product(range(vocab), repeat=5)))
    tokens = np.array([tokens for tokens, _ in proposals])
    pick = np.array(list(itertools.product(range(len(tokens)), range(len(wanted)))))
    tokens, wanted = tokens[pick[:, 0]], wanted[pick[:, 1]]
    flat = np.full((len(pick), 5, vocab), 1 / vocab)
    found = outcomes(Match(), parent, ForcedTokens(wanted, vocab), pick[:, 0], tokens, flat, None)
    emitted = np.concatenate([found.accepted, np.zeros((len(pick), 1), int)], axis=1)
    np.put_along_axis(emitted, found.num_accepted[:, None], found.next_token[:, None], axis=1)
    for row in range(len(pick)):
        node, text = 0, []
        while True:
            text.append(wanted[row, node])
            node = next((n for n in range(1, 5) if parent[n] == node and tokens[row, n] == text[-1]), None)
            if node is None:
                break
        assert emitted[row, : found.num_accepted[row] + 1].tolist() == text


def walk(uniform, parent, tokens, target, draft, rule="rejection"):
    with enable_x64(True):
        proposal = Proposal(jnp.array(tokens, jnp.int32), jnp.array(parent, jnp.int32), None)
        draft = None if draft is None else jnp.array(draft)
        found = jax.jit(WALKS[rule])(jnp.array(uniform), proposal, jnp.array(target), draft)
        return tuple(map(np.asarray, found))


@pytest.mark.parametrize("rule", WALKS)
def test_a_guess_of_zero_draft_mass_is_never_accepted(rule):
    """It was not drawn, and u * 0 < p would favour it, for any u."""
    target = np.full((2, 4), 0.25)
    draft = np.array([[0.5, 0.5, 0.0, 0.0]] * 2)
    node, residual, chance = walk([0.0, 0.0], (-1, 0), (0, 2), target, draft, rule)
    assert node == 0
    assert chance.tolist() == [1, 1 if rule == "rejection" else 0]
    np.testing.assert_allclose(residual, target[0])


def test_a_sibling_after_the_whole_draft_mass_is_never_accepted():
    """A one-hot draft has one guess; what stands beside it has no mass left."""
    target = np.full((3, 4), 0.25)
    draft = np.eye(4)[[1, 1, 1]]
    node, residual, _ = walk([0.0, 1.0, 0.0], (-1, 0, 0), (0, 1, 2), target, draft)
    assert node == 0
    np.testing.assert_allclose(residual, [1 / 3, 0, 1 / 3, 1 / 3])


@pytest.mark.parametrize("drawn_from", ["logits", "point mass"])
@pytest.mark.parametrize("rule", WALKS)
def test_an_empty_residual_falls_back_to_the_target(rule, drawn_from):
    """Refused only by rounding, where draft and target are equal: the target itself is the right answer."""
    target = np.array([[0.0, 1.0, 0.0]] * 2)
    draft = target if drawn_from == "logits" else None
    node, residual, chance = walk([1.0, 1.0], (-1, 0), (0, 1), target, draft, rule)
    assert node == 0
    assert chance[1] == 1
    np.testing.assert_array_equal(residual, target[0])


def test_walk_accepts_as_often_as_it_says():
    """`chance` is the decision: following u < chance by hand leads to the same node."""
    rng = np.random.default_rng(3)
    parent, tokens = (-1, 0, 0, 1, 1, 2, 4), (0, 1, 3, 0, 2, 1, 3)
    seen = set()
    for _ in range(60):
        uniform = rng.random(7)
        target, draft = rng.dirichlet(np.ones(5), 7), rng.dirichlet(np.ones(5), 7)
        node, _, chance = walk(uniform, parent, tokens, target, draft)
        at = 0
        for n in range(1, 7):
            if parent[n] == at and uniform[n] < chance[n]:
                at = n
        assert node == at
        seen.add(int(node))
    assert len(seen) >= 5


def test_block_weighs_as_the_paper_says():
    """Algorithm 2, equation 4, in plain words: weights, chances, the longest kept prefix, and its residual."""
    rng = np.random.default_rng(4)
    seen = set()
    for _ in range(40):
        uniform, tokens = rng.random(5), rng.integers(0, 4, 5)
        target, draft = rng.dirichlet(np.ones(4), 5), rng.dirichlet(np.ones(4), 5)
        end = int(rng.integers(1, 5))  # the rest of the chain is absent
        parent = [n - 1 if n <= end else -1 for n in range(5)]
        node, residual, chance = walk(uniform, parent, tokens, target, draft, "block")
        weight, kept, left = 1.0, 0, np.maximum(target[0] - draft[0], 0)
        for n in range(1, end + 1):
            weight = min(1, weight * target[n - 1, tokens[n]] / draft[n - 1, tokens[n]])
            rest = np.maximum(weight * target[n] - draft[n], 0)
            wanted = weight if n == end else rest.sum() / (rest.sum() + 1 - weight)
            assert chance[n] == pytest.approx(wanted, abs=1e-12)
            if uniform[n] < wanted:
                kept, left = n, target[n] if n == end else rest
        assert node == kept
        np.testing.assert_allclose(residual, left / left.sum(), atol=1e-12)
        assert (chance[end + 1 :] == 0).all()
        seen.add((kept, end))
    assert len(seen) >= 10


@pytest.mark.parametrize("rule", [rule for rule in RULES if RULES[rule].exact and judged_by(rule, ("breadth first",))])
def test_the_verdict_is_a_path_of_the_tree(rule):
    """From the root down in steps of one, padded with its end, and as long as it says."""
    vocab, parent = SHAPES["breadth first"]
    target, _ = tables(vocab)
    p = [list(map(target, (prefix(parent, (0, 1, 2, 0, 1), n) for n in range(5))))]
    p, tokens = np.repeat(p, 4, axis=0), np.array([[0, 1, 2, 0, 1]] * 4)
    if RULES[rule].shared_noise:
        draw = ForcedTokens(jnp.array([[0, 0, 0, 0, 0], [1, 1, 0, 2, 2], [2, 0, 1, 0, 2], [2, 1, 0, 0, 0]]), vocab)
    else:
        uniform = jnp.array([[0, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 1, 0, 1, 0], [0, 1, 0, 1, 1]])
        draw = ForcedUniform(uniform, jnp.array([0, 1, 2, 0]), vocab)
    up = jnp.array(parent, jnp.int32)
    judge = jax.vmap(lambda d, t, logits: RULES[rule]()(d, Proposal(t, up, None), logits, 2))
    verdict = judge(draw, jnp.array(tokens, jnp.int32), jnp.log(jnp.array(p, jnp.float32)))
    assert verdict.path.tolist() == [[0, 0, 0], [0, 1, 1], [0, 2, 4], [0, 2, 2]]
    assert verdict.num_accepted.tolist() == [0, 1, 2, 1]
    assert {x.dtype for x in jax.tree.leaves(verdict)} == {jnp.dtype("int32")}


# Rules that change the distribution: which guesses they keep is a statement about the target's numbers alone.


def possible(parent, tokens, target, rule):
    """[node] -> whether `rule` keeps the text up to it, guess by guess, in plain words."""
    chosen = [1.0] + [float(target[max(up, 0)][tokens[n]]) for n, up in list(enumerate(parent))[1:]]

    def likely(n):
        if isinstance(rule, Threshold):
            return chosen[n] >= rule.threshold
        p = target[parent[n]][target[parent[n]] > 0]
        surprise = -(p * np.log(p)).sum()
        return chosen[n] > min(rule.posterior_threshold, rule.posterior_alpha * np.exp(-surprise))

    def keeps(n):
        way = toys.ancestors(parent, n)
        return way[0] == 0 and all(chosen[m] > 0 and likely(m) for m in way[1:])

    if not getattr(rule, "mean", False):
        return [keeps(n) for n in range(len(parent))]
    found = [n == 0 for n in range(len(parent))]
    for leaf in range(1, len(parent)):
        way = toys.ancestors(parent, leaf)
        values = [chosen[m] for m in way[1:]]
        if leaf not in parent and way[0] == 0 and min(values) > 0 and np.mean(values) >= rule.threshold:
            found[leaf] = True
    return found


INEXACT = [Threshold(), Threshold(0.55), Threshold(0.4, mean=True), Typical(), Typical(0.3, 0.8), Typical(0.02, 0.1)]


def decide(rule, shape, table=Table):
    """What `rule` says of every proposal of a shape: tokens, target [M, N, V], the target's draws, and the outcome."""
    vocab, parent = SHAPES[shape]
    tokens = np.array([(0, *rest) for rest in itertools.product(range(vocab), repeat=len(parent) - 1)])
    target = rows_of(parent, tokens, table(vocab, 5))
    wanted = np.argmax(target * np.random.default_rng(6).random(target.shape), axis=-1)  # any that are possible
    found = outcomes(rule, parent, ForcedTokens(wanted, vocab), np.ones(len(tokens)), tokens, target, None)
    return tokens, target, wanted, found


def test_every_inexact_rule_is_enumerated():
    """A rule that makes no claim has a case too."""
    assert {type(rule) for rule in INEXACT} == {rule for rule in RULES.values() if not rule.exact}


@pytest.mark.parametrize("table", [Table, SparseTable, GreedyTable])
@pytest.mark.parametrize("shape", ["chain of 3", "siblings below", "absent between siblings"])
@pytest.mark.parametrize("rule", INEXACT, ids=repr)
def test_an_inexact_rule_keeps_the_longest_path_that_it_may(rule, shape, table):
    """Of every proposal; after it comes the target's own draw."""
    parent = SHAPES[shape][1]
    tokens, target, wanted, found = decide(rule, shape, table)
    lengths = set()
    for row in range(len(tokens)):
        keeps = possible(parent, tokens[row], target[row], rule)
        depth = [len(toys.ancestors(parent, n)) - 1 if keeps[n] else -1 for n in range(len(parent))]
        node = int(np.argmax(depth))
        way = toys.ancestors(parent, node)
        assert found.num_accepted[row] == depth[node]
        assert found.accepted[row][: depth[node]].tolist() == tokens[row][way[1:]].tolist()
        assert found.next_token[row] == wanted[row, node]
        lengths.add(depth[node])
    assert len(lengths) > 1


@pytest.mark.parametrize("shape", ["chain of 3", "breadth first"])
@pytest.mark.parametrize("mean", [False, True])
def test_threshold_from_all_to_nothing(mean, shape):
    """At 0 it keeps all that is possible, at 1 nothing, and then the text is that of plain decoding."""
    everything, nothing = (decide(Threshold(value, mean), shape)[3] for value in (0, 1))
    assert set(everything.num_accepted) == {everything.accepted.shape[1]}
    wanted = decide(Threshold(1, mean), shape)[2]
    assert set(nothing.num_accepted) == {0}
    np.testing.assert_array_equal(nothing.next_token, wanted[:, 0])


@pytest.mark.parametrize("rule", INEXACT, ids=repr)
def test_at_temperature_0_an_inexact_rule_is_greedy(rule):
    """One-hot rows: it emits what `match` emits of a tree, or with `mean` a beginning of it."""
    vocab, parent = SHAPES["siblings below"]
    tokens, target, _, _ = decide(rule, "siblings below", GreedyTable)
    draw = ForcedTokens(target.argmax(-1), vocab)
    greedy, found = (outcomes(r, parent, draw, np.ones(len(tokens)), tokens, target, None) for r in (Match(), rule))
    for row in range(len(tokens)):
        text, wanted = (
            [*o.accepted[row][: o.num_accepted[row]].tolist(), int(o.next_token[row])] for o in (found, greedy)
        )
        assert text == wanted[: len(text)] if getattr(rule, "mean", False) else text == wanted


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["threshold", "posterior_threshold", "posterior_alpha"])
def test_a_threshold_outside_0_and_1_is_refused(name, value):
    """By name and value, before anything is compiled."""
    rule = Threshold if name == "threshold" else Typical
    with pytest.raises(ValueError, match=rf"^{name}={value} is not allowed; it must lie in \[0, 1\]$"):
        rule(**{name: value})


def test_chains_only():
    """A rule for chains is not paired with a proposer of trees, which the error names, before any compilation."""
    with pytest.raises(ValueError, match="BlockVerification judges chains only, and SampledTree proposes trees: use"):
        toys.decoder("tree", "block")
