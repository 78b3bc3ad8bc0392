"""The distribution that a rule emits, computed by enumeration instead of sampling.

The vocabulary has three or four tokens. Target and draft are tables with a random distribution
after every prefix. Every proposal is enumerated too, with the probability of drawing its tokens.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import trees

from specjax import RULES, Match, Proposal
from specjax.rules import block, rejection
from specjax.tree import Tree

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
CHAINS = [
    name
    for name, (_, parent) in SHAPES.items()
    if all(up in (n - 1, -1) for n, up in enumerate(parent))
]


def judged_by(rule, shapes=tuple(SHAPES)):
    """The shapes that `rule` can judge."""
    return [shape for shape in shapes if shape in CHAINS or not RULES[rule].chain_only]


class Table:
    """A random distribution after every prefix."""

    def __init__(self, vocab, seed):
        self.vocab, self.rng, self.rows = vocab, np.random.default_rng(seed), {}

    def __call__(self, prefix):
        if prefix not in self.rows:
            self.rows[prefix] = self.rng.dirichlet(np.full(self.vocab, 0.7))
        return self.rows[prefix]


class GreedyTable(Table):
    """Temperature 0: the rows are one-hot."""

    def __call__(self, prefix):
        row = super().__call__(prefix)
        return (row == row.max()).astype(float)


class SparseTable(Table):
    """Rows as after top-k: one token has no mass."""

    def __call__(self, prefix):
        row = super().__call__(prefix)
        return np.where(row == row.min(), 0, row) / (1 - row.min())


def prefix(parent, tokens, node):
    """The tokens on the way from the root (not counted) to `node`."""
    return tuple(int(tokens[n]) for n in trees.ancestors(parent, node)[1:])


def drawn(parent, draft):
    """Every way to draw a tree's tokens from `draft`, siblings without replacement: (tokens,
    chance)."""

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
        if left.sum() == 0:  # no mass is left, so any token may stand here and must not matter
            yield from extend([*tokens, n % draft.vocab], chance)
            return
        for token in np.flatnonzero(left):
            yield from extend([*tokens, int(token)], chance * left[token] / left.sum())

    yield from extend([0], 1.0)


def best(parent, draft):
    """The one tree that argmax drafts: siblings are the draft's best tokens in order."""
    tokens = [0]
    for n in range(1, len(parent)):
        rank = sum(parent[m] == parent[n] for m in range(1, n))
        row = draft(prefix(parent, tokens, max(parent[n], 0)))
        tokens.append(int(np.argsort(-row, kind="stable")[rank]) if parent[n] >= 0 else 0)
    yield tuple(tokens), 1.0


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """Emissions and their probabilities, one per row."""

    chance: np.ndarray
    accepted: np.ndarray  # [M, D] tokens
    num_accepted: np.ndarray
    next_token: np.ndarray


def rows_of(parent, proposals, table):
    """[M, N, V]: the table's distribution after each node of each proposal."""
    return np.array(
        [[table(prefix(parent, tokens, n)) for n in range(len(parent))] for tokens in proposals]
    )


@functools.partial(jax.jit, static_argnums=0)
def judge(rule, parent, draw, tokens, target, draft):
    """Run `rule` on every case: the tokens on its path, how many it accepts, and the next token.

    The tree is data, so that all trees of a size share a program.
    """
    max_depth = len(parent) - 1

    def one(draw, tokens, target, draft):
        logits = None if draft is None else jnp.log(draft)
        proposal = Proposal(tokens, parent, logits, point_mass=draft is None)
        tree = Tree.of(proposal.parent, max_depth)
        verdict = rule(draw, proposal, tree, jnp.log(target))
        return tokens[tree.path[verdict.node]], tree.depth[verdict.node], verdict.next_token

    return jax.vmap(one)(draw, tokens, target, draft)


def weigh(uniform, proposal, target, draft):
    """`block.weigh` with the signature of `rejection.walk`."""
    chance, residual = block.weigh(proposal, target, draft)
    node = jnp.max(jnp.where(uniform < chance, jnp.arange(len(chance)), 0))
    return node, residual[node] / residual[node].sum(), chance.at[0].set(1)


WALKS = {"rejection": rejection.walk, "block": weigh}


@functools.partial(jax.jit, static_argnums=0)
def walk_all(rule, parent, uniform, tokens, target, draft):
    def one(uniform, tokens, target, draft):
        return WALKS[rule](uniform, Proposal(tokens, parent), target, draft)

    return jax.vmap(one)(uniform, tokens, target, draft)


def in_buckets(function, *cases):
    """Apply `function` to all cases, padded to a power of four so that few sizes are compiled."""
    count = len(cases[1])
    size = 256
    while size < count:
        size *= 4
    padded = jax.tree.map(
        lambda x: np.pad(x, [(0, size - count)] + [(0, 0)] * (x.ndim - 1), mode="edge"), cases
    )
    return [np.asarray(x)[:count] for x in function(*padded)]


def outcomes(rule, parent, draw, chance, tokens, target, draft):
    """Run `rule` on all cases at once: draw [M, ...], tokens [M, N], probabilities [M, N, V]."""
    path, accepted, token = in_buckets(
        functools.partial(judge, rule, np.array(parent, np.int32)), draw, tokens, target, draft
    )
    deepest = max(len(trees.ancestors(parent, n)) - 1 for n in range(len(parent)))
    return Outcomes(np.asarray(chance), path[:, 1 : deepest + 1], accepted, token)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class ForcedUniform:
    """Stands for `IndependentDraw`: the acceptance draws and the next token are given."""

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
        return jnp.where(jnp.arange(self.size) == self.tokens[node][:, None], 1e9, 0.0)


def enumerate_acceptance(rule, parent, proposals, target, draft):
    """Enumerate every pattern of accepting and rejecting, weighed by the walk's chances, and
    every residual token."""
    vocab, nodes = target.vocab, len(parent)
    tokens, weight = (np.array(x) for x in zip(*proposals, strict=True))
    # A uniform of 0 accepts whatever can be accepted; 1 rejects whatever can be rejected.
    patterns = np.array([(0, *p) for p in itertools.product((0.0, 1.0), repeat=nodes - 1)])
    pick = np.array(list(itertools.product(range(len(tokens)), range(len(patterns)))))
    tokens, weight, uniform = tokens[pick[:, 0]], weight[pick[:, 0]], patterns[pick[:, 1]]
    p = rows_of(parent, tokens, target)
    q = None if draft is None else rows_of(parent, tokens, draft)
    _, residual, chance = in_buckets(
        functools.partial(walk_all, rule, np.array(parent, np.int32)), uniform, tokens, p, q
    )
    weight = weight * np.where(uniform == 0, chance, 1 - chance).prod(1)
    np.testing.assert_allclose(residual.sum(1), 1, atol=1e-12)
    live = np.flatnonzero(weight)
    case, token = np.repeat(live, vocab), np.tile(np.arange(vocab), len(live))
    weight = weight[case] * residual[case, token]
    case, token, weight = case[weight > 0], token[weight > 0], weight[weight > 0]
    draw = ForcedUniform(uniform[case], token, vocab)
    return outcomes(
        RULES[rule](), parent, draw, weight, tokens[case], p[case], None if q is None else q[case]
    )


def enumerate_match(parent, proposals, target, draft):
    """Enumerate every draw of the target at every node."""
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


ENUMERATE = {
    "match": enumerate_match,
    **{rule: functools.partial(enumerate_acceptance, rule) for rule in WALKS},
}


def joint(emitted, target, length):
    """[V] * length: the distribution of the text when the target continues each emission."""
    total = np.zeros((target.vocab,) * length)
    emissions = {}
    for chance, accepted, count, token in zip(
        emitted.chance, emitted.accepted, emitted.num_accepted, emitted.next_token, strict=True
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
        emitted = ENUMERATE[rule](parent, list(proposals), target, draft)
    length = emitted.accepted.shape[1] + 1
    np.testing.assert_allclose(
        joint(emitted, target, length), continuation(target, (), length), rtol=0, atol=1e-12
    )
    return emitted


@functools.cache
def tables(vocab):
    return Table(vocab, 1), Table(vocab, 2)
