"""Predicts the outcomes of a verification, to draft for them before the verdict is known.

    proposal      the cat sat on          outcomes    "the cat sat on" accepted, then "a"
                                                      "the cat" accepted, then "is" instead of "sat"

An outcome is a verdict: the last accepted node, and the token after it.  Its probability is
estimated as that of accepting the nodes on the path, times that of accepting no child, times that
of the token by its rank among the draft's guesses.  All three are counted for each row.

Reference: Liu et al. 2024 (PEARL), arXiv 2408.11850, section 3, drafts on after full acceptance;
Kumar et al. 2026 (Saguaro), arXiv 2603.03251, for several predicted outcomes.
"""

from __future__ import annotations

import dataclasses
from typing import Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax import sampling
from specjax.overlap.sides import DecoderLike, NextToken, commit_by, tree_of
from specjax.tree import Tree
from specjax.types import ABSENT, DecodeState, Params, Proposal, Verdict

_T = TypeVar("_T")

_PRIOR = 4.0  # the steps that the first estimates weigh
_FIRST, _SIBLING = 0.7, 0.3  # the first estimate of a first child; each later sibling has less
_GUESSED, _FALLS = 0.3, 0.5  # the first estimate that the best guess is right; each next has less
_BLIND = 0.5  # all of these times this, where a token is drawn with noise that the guess lacks


@dataclasses.dataclass(frozen=True)
class Fan:
    """The numbers of outcomes that a row drafts for at a time."""

    outcomes: int
    ranks: int  # guesses of the token after a node
    coupled: bool  # guess it with the noise that it will be drawn with


@struct.dataclass
class Foresight:
    """Counts per row: accepted drafts, right guesses, and how often a proposal was ready."""

    tested: Array  # [B, N] float32; steps in which the node's parent was accepted
    accepted: Array  # [B, N] float32; those in which the node was
    # [B, 2] float32; steps with guesses at the last accepted node: [0] after a rejection, [1] not.
    guessed: Array
    right: Array  # [B, 2, R] float32; those in which the guess of each rank was right
    asked: Array  # [B] int32; steps that went on, after which the draft had to have a proposal
    hits: Array  # [B] int32; those in which it had one
    hoped: Array  # [B] float32; the sum of the estimated probabilities of a hit

    @classmethod
    def create(cls, rows: int, nodes: int, ranks: int, blind: Array | None = None) -> Self:
        """Returns zero counts; `blind` [B]: tokens are drawn with noise that the guesses lack."""
        zero = jnp.zeros(rows, jnp.int32)
        blind = jnp.zeros(rows, bool) if blind is None else blind
        falling = (
            jnp.where(blind, _BLIND, 1)[:, None, None] * _GUESSED * _FALLS ** jnp.arange(ranks)
        )
        return cls(
            tested=jnp.zeros((rows, nodes)),
            accepted=jnp.zeros((rows, nodes)),
            guessed=jnp.full((rows, 2), _PRIOR),
            right=_PRIOR * jnp.broadcast_to(falling, (rows, 2, ranks)),
            asked=zero,
            hits=zero,
            hoped=jnp.zeros(rows),
        )

    def ends(self, tree: Tree) -> Array:
        """Returns [B, N] the estimated probability that a node is the last accepted one."""
        index = jnp.arange(tree.parent.shape[1])
        present = tree.parent != ABSENT
        siblings = (tree.parent[:, :, None] == tree.parent[:, None]) & (index[:, None] > index)
        first = _FIRST * _SIBLING ** (siblings & present[:, None]).sum(-1)
        each = (self.accepted + _PRIOR * first) / (self.tested + _PRIOR)
        each = jnp.where(present, each, 0)
        is_child = (tree.parent[:, None] == index[:, None]) & present[:, None]  # [B, N, child]
        stops = jnp.maximum(1 - (is_child * each[:, None]).sum(-1), 0)
        # The root is always accepted.
        factors = jnp.where(tree.ancestors & (index > 0), each[:, None], 1)
        reached = present.at[:, 0].set(True)
        return jnp.where(reached, factors.prod(-1) * stops, 0)

    def observe(self, tree: Tree, verdict: Verdict, live: Array) -> Self:
        """Counts the accepted nodes of a verdict [B], for the rows that are `live` [B]."""
        on_path = jax.vmap(lambda ancestors, node: ancestors[node])(tree.ancestors, verdict.node)
        parent = jnp.maximum(tree.parent, 0)
        tested = (tree.parent != ABSENT) & jnp.take_along_axis(on_path, parent, axis=1)
        tested &= live[:, None]
        return dataclasses.replace(
            self, tested=self.tested + tested, accepted=self.accepted + (tested & on_path)
        )


@struct.dataclass
class Ahead:
    """The prepared proposals for F outcomes of each row; the F rows of a row are adjacent."""

    verdict: Verdict  # node and next_token [B, F]
    state: DecodeState  # of B * F rows
    proposal: Proposal  # of B * F rows
    hoped: Array  # [B] the estimated probability that the verdict is one of them
    nodes: Array  # [B, G] those with guesses
    guesses: Array  # [B, G, R] the tokens that may follow, the likeliest first


def widen(tree: _T, count: int) -> _T:
    """Repeats every row `count` times, [B, ...] -> [B * count, ...]."""
    return tree if count == 1 else jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), tree)


def draft(decoder: DecoderLike, params: Params, state: DecodeState) -> tuple[Proposal, DecodeState]:
    """Runs `decoder.propose`, and drops the values that the target need not know."""
    proposal, state = decoder.propose(params, state)
    return dataclasses.replace(proposal, chance=None, given=None), state


def look_ahead(
    decoder: DecoderLike,
    fan: Fan,
    params: Params,
    state: DecodeState,
    proposal: Proposal,
    foresight: Foresight,
) -> Ahead:
    """Drafts the next proposal for the likeliest outcomes of this one.

    Args:
      decoder: the draft's half.
      state: after `proposal` was made, of B rows.
    """
    rows, num_nodes = proposal.tokens.shape
    tree = tree_of(decoder, state, proposal)
    ends = foresight.ends(tree)
    count = min(num_nodes, fan.outcomes)
    _, nodes = sampling.top_k(ends, count)
    nodes = nodes.astype(jnp.int32)

    guesses, valid = _guesses(decoder, fan, params, state, proposal, tree, nodes)
    has_child = (tree.parent[:, None] == nodes[..., None]).any(-1)
    kind = (~has_child).astype(jnp.int32)  # 0: after a rejection, 1: a bonus token
    share = foresight.right / foresight.guessed[..., None]
    share = jax.vmap(lambda row, kind: row[kind])(share, kind)  # [B, G, R]
    weight = jnp.take_along_axis(ends, nodes, axis=1)[..., None] * share
    weight = jnp.where(valid, weight, 0).reshape(rows, -1)
    most, best = jax.lax.top_k(weight, fan.outcomes)
    node = jnp.take_along_axis(nodes, best // fan.ranks, axis=1)
    token = jnp.take_along_axis(guesses.reshape(rows, -1), best, axis=1)
    verdict = Verdict(node, token)

    states, before = widen((state, proposal), fan.outcomes)
    flat = jax.tree.map(lambda x: x.reshape(-1), verdict)
    after = commit_by(decoder, params, states, before, flat)
    proposals, after = draft(decoder, params, after)
    return Ahead(verdict, after, proposals, most.sum(1), nodes, guesses)


def _guesses(
    decoder: DecoderLike,
    fan: Fan,
    params: Params,
    state: DecodeState,
    proposal: Proposal,
    tree: Tree,
    nodes: Array,
) -> tuple[Array, Array]:
    """Returns tokens that may follow each of the `nodes` [B, G] without being one of its drafts.

    Returns:
      Tokens [B, G, R], the likeliest first, and [B, G, R] bool, which of them are valid.
    """
    count = nodes.shape[1]
    num_nodes, size = proposal.tokens.shape[1], decoder.target.vocab_size
    drafted = 1 if decoder.proposer.is_chain else num_nodes - 1
    most = min(fan.ranks + drafted, size)
    guessing = NextToken(decoder.proposer, most, fan.coupled)
    guesser = dataclasses.replace(decoder, proposer=guessing)

    # The text up to a node is what would be committed if its token were the next one after its
    # parent.  The root's text is committed already.
    (states, drafts), at = widen((state, proposal), count), nodes.reshape(-1)
    parent, token = (
        jnp.take_along_axis(x, at[:, None], axis=1)[:, 0] for x in (drafts.parent, drafts.tokens)
    )
    verdict = Verdict(jnp.maximum(parent, 0), token)
    after = select(at == 0, states, commit_by(decoder, params, states, drafts, verdict))
    found = guesser.propose(params, after)[0].tokens[:, 1:].reshape(*nodes.shape, most)

    is_child = tree.parent[:, None] == nodes[..., None]  # [B, G, N]
    same = found[..., None] == proposal.tokens[:, None, None]
    left = ~(same & is_child[:, :, None]).any(-1)
    # Those that are left move to the front, in their order.
    order = jnp.argsort(~left, axis=-1, stable=True)[..., : fan.ranks]
    found, left = (jnp.take_along_axis(x, order, axis=-1) for x in (found, left))
    spare = fan.ranks - found.shape[-1]  # a vocabulary smaller than the guesses
    pads = ((0, 0), (0, 0), (0, spare))
    return jnp.pad(found, pads), jnp.pad(left, pads)


def select(chosen: Array, first: _T, second: _T) -> _T:
    """Selects rows of `first` where `chosen` [B], and of `second` elsewhere."""

    def of(x: Array, y: Array) -> Array:
        return jnp.where(chosen.reshape(-1, *[1] * (x.ndim - 1)), x, y)

    return jax.tree.map(of, first, second)


def settle(
    decoder: DecoderLike,
    params: Params,
    state: DecodeState,
    proposal: Proposal,
    foresight: Foresight,
    verdict: Verdict,
    ahead: Ahead | None,
) -> tuple[DecodeState, Proposal, Foresight]:
    """Commits a verdict [B], and takes the proposal that was prepared for it, or drafts anew.

    A row drafts anew if no proposal was prepared for its verdict.  The other rows keep theirs.
    """
    tree = tree_of(decoder, state, proposal)
    after = commit_by(decoder, params, state, proposal, verdict)
    foresight = foresight.observe(tree, verdict, ~state.done)
    if ahead is None:
        missing, carry = ~after.done, (after, proposal)
    else:
        same = ahead.verdict.node == verdict.node[:, None]
        same &= ahead.verdict.next_token == verdict.next_token[:, None]
        hit = same.any(1) & ~after.done
        foresight = _learned(foresight, tree, verdict, ahead, hit, ~after.done)
        picked = _pick((ahead.state, ahead.proposal), sampling.argmax(same))
        missing, carry = ~hit & ~after.done, select(hit, picked, (after, proposal))

    def turn(
        carry: tuple[Array, DecodeState, Proposal],
    ) -> tuple[Array, DecodeState, Proposal]:
        missing, state, proposal = carry
        drafted, begun = draft(decoder, params, after)
        kept = select(missing, (begun, drafted), (state, proposal))
        return jnp.zeros_like(missing), *kept

    # A loop of at most one iteration instead of a branch: XLA copies what a branch returns.
    _, state, proposal = jax.lax.while_loop(lambda carry: carry[0].any(), turn, (missing, *carry))
    return state, proposal, foresight


def _pick(rows: _T, index: Array) -> _T:
    """Picks rows of [B * F, ...] by the index [B]: [B, ...]."""
    if len(index) == len(jax.tree.leaves(rows)[0]):
        return rows
    return jax.tree.map(
        lambda x: jax.vmap(lambda row, n: row[n])(x.reshape(len(index), -1, *x.shape[1:]), index),
        rows,
    )


def _learned(
    foresight: Foresight, tree: Tree, verdict: Verdict, ahead: Ahead, hit: Array, live: Array
) -> Foresight:
    here = (ahead.nodes == verdict.node[:, None]) & live[:, None]  # [B, G]
    right = here[..., None] & (ahead.guesses == verdict.next_token[:, None, None])
    rejected = (tree.parent == verdict.node[:, None]).any(1)
    kind = jnp.stack([rejected, ~rejected], axis=1)  # [B, 2]
    return dataclasses.replace(
        foresight,
        guessed=foresight.guessed + (here.any(1)[:, None] & kind),
        right=foresight.right + (right.any(1)[:, None] & kind[..., None]),
        asked=foresight.asked + live,
        hits=foresight.hits + hit,
        hoped=foresight.hoped + jnp.where(live, ahead.hoped, 0),
    )


def hit_rate(foresight: Foresight) -> tuple[float | None, float | None]:
    """Returns the share of steps with a ready proposal, and the estimate of that share."""
    asked = int(np.sum(np.asarray(foresight.asked)))
    if asked == 0:
        return None, None
    hits, hoped = np.sum(np.asarray(foresight.hits)), np.sum(np.asarray(foresight.hoped))
    return float(hits) / asked, float(hoped) / asked
