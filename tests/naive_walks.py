"""What each rule decides about one row, by a naive walk in NumPy, and cases for it."""

from __future__ import annotations

import chex
import jax
import numpy as np
import trees
from properties import distinct_siblings

from specjax import RULES

VOCAB, MOST = 6, 4
"""Tokens, and the most children of a node."""


def naive_depth(parent, node):
    return len(trees.ancestors(parent, node)) - 1


@chex.dataclass
class Draw:
    """Given draws, of both kinds of noise."""

    uniform: jax.Array  # [N]
    last: jax.Array  # [V]
    gumbel: jax.Array  # [D + 1, V]

    def acceptance(self, num_nodes):
        assert self.uniform.shape == (num_nodes,)
        return self.uniform

    def residual(self):
        return self.last

    def noise(self, node, depth):
        return self.gumbel[depth]


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def log(x):
    with np.errstate(divide="ignore"):
        return np.log(x)


def walk_match(case):
    """Go to the child that the target drew, as long as there is one."""
    node = 0
    while True:
        depth = naive_depth(case["parent"], node)
        wanted = int(np.argmax(case["target"][node] + case["draw"].gumbel[depth]))
        below = [n for n in case["children"][node] if case["tokens"][n] == wanted]
        if not below:
            return node, wanted
        node = below[0]


def walk_rejection(case):
    """Try the children in turn: after each rejection the residual is left."""
    node = 0
    while True:
        p = softmax(case["target"][node])
        q = None if case["draft"] is None else softmax(case["draft"][node])
        for child in case["children"][node]:
            token = case["tokens"][child]
            mass = 1 if q is None else q[token]
            if mass > 0 and case["draw"].uniform[child] * mass < p[token]:
                node = child
                break
            if mass > 0:
                left = np.maximum(p - (np.eye(VOCAB)[token] if q is None else q), 0)
                if q is None:
                    left = np.where(np.arange(VOCAB) == token, 0, p)
                else:
                    q = np.where(np.arange(VOCAB) == token, 0, q)
                    q = q / q.sum() if q.sum() else q
                p = left / left.sum() if left.sum() else p
        else:
            return node, int(np.argmax(log(p) + case["draw"].last))


def walk_block(case):
    """Algorithm 2 of Sun et al.: the longest accepted prefix of a chain."""
    p, end, weight = softmax(case["target"]), 0, 1.0
    q = np.zeros_like(p) if case["draft"] is None else softmax(case["draft"])
    # A draft without any mass was not drawn, so the chain ends before it.
    while case["children"][end] and (case["draft"] is None or q[end, case["tokens"][end + 1]] > 0):
        end += 1
    node, left = 0, None
    for n in range(end + 1):
        if n:
            token = case["tokens"][n]
            mass = 1 if case["draft"] is None else q[n - 1, token]
            weight = min(1.0, weight * p[n - 1, token] / mass)
        after = (
            q[n] if case["draft"] is not None else np.eye(VOCAB)[case["tokens"][(n + 1) % len(p)]]
        )
        rest = np.maximum(weight * p[n] - (0 if n == end else after), 0)
        both = rest.sum() + 1 - weight
        chance = weight if n == end else rest.sum() / both if both else 1
        if n == 0 or case["draw"].uniform[n] < chance:
            node, left = n, rest if rest.sum() else p[n]
    return node, int(np.argmax(log(left) + case["draw"].last))


def follow(case, kept):
    """The longest path of kept drafts, the lowest node of several; then the target's own draw."""
    best = 0
    for node in range(len(case["parent"])):
        way = trees.ancestors(case["parent"], node)
        if way[0] == 0 and all(kept[n] for n in way[1:]):
            if len(way) - 1 > naive_depth(case["parent"], best):
                best = node
    gumbel = case["draw"].gumbel[naive_depth(case["parent"], best)]
    return best, int(np.argmax(case["target"][best] + gumbel))


def likelihood(case, node):
    """The target's probability of a draft; 0 without one."""
    up = case["parent"][node]
    return 0.0 if up < 0 else softmax(case["target"][up])[case["tokens"][node]]


def walk_typical(case):
    def kept(node):
        p = softmax(case["target"][max(case["parent"][node], 0)])
        entropy = -np.sum(np.where(p > 0, p * log(np.where(p > 0, p, 1)), 0))
        return likelihood(case, node) > min(0.09, 0.3 * np.exp(-entropy))

    return follow(case, [kept(node) for node in range(len(case["parent"]))])


def walk_threshold(case):
    return follow(case, [likelihood(case, n) >= 0.3 for n in range(len(case["parent"]))])


def walk_mean(case):
    """Whole paths to leaves, by the mean of their likelihoods."""
    kept = [False] * len(case["parent"])
    for leaf in range(1, len(kept)):
        way = trees.ancestors(case["parent"], leaf)
        if case["children"][leaf] or way[0] != 0:
            continue
        likely = [likelihood(case, n) for n in way[1:]]
        if min(likely) > 0 and sum(likely) >= 0.3 * len(likely):
            for n in way[1:]:
                kept[n] = True
    return follow(case, kept)


WALKS = {
    "match": (RULES["match"](), walk_match),
    "rejection": (RULES["rejection"](), walk_rejection),
    "block": (RULES["block"](), walk_block),
    "typical": (RULES["typical"](), walk_typical),
    "threshold": (RULES["threshold"](), walk_threshold),
    "threshold, mean": (RULES["threshold"](mean=True), walk_mean),
}


def a_case(parent, rng, max_depth, drawn):
    """Everything that a rule is given.  In a third of the nodes some logits are -inf, as after
    top-k."""
    size = len(parent)
    tokens = distinct_siblings(rng, parent, VOCAB)
    # Drafts that decide a rule either way, and trees that are accepted far down.
    likely, uniform = rng.choice([0.5, 2, 12]), rng.random(size) ** rng.choice([1, 4])
    target = rng.normal(size=(size, VOCAB))
    for node in range(1, size):
        if parent[node] >= 0:
            target[parent[node], tokens[node]] += likely * rng.uniform(0.5, 1)
    draft = target + rng.normal(size=target.shape)
    for logits in (target, draft):
        cut = rng.random(size) < 1 / 3
        logits[cut] = np.where(
            logits[cut] < np.sort(logits[cut], 1)[:, -4:-3], -np.inf, logits[cut]
        )
    noise = rng.gumbel(size=(max_depth + 2, VOCAB))
    children = [np.flatnonzero(parent == node).tolist() for node in range(size)]
    return {
        "parent": parent,
        "tokens": tokens,
        "target": target,
        "draft": draft if drawn else None,
        "draw": Draw(uniform=uniform, last=noise[0], gumbel=noise[1:]),
        "children": children,
    }
