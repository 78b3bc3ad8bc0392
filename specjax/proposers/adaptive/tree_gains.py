"""`TreeGains`, `ChainGains`: the tokens of a step by the nodes of a tree, or of a chain."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax import tree
from specjax.proposers.combine import right_nodes
from specjax.types import ABSENT, Proposal

_WINDOW = 128.0  # steps
_FADES, _FADES_BESIDE = 1 - 1 / 48, 1 - 1 / 96
"""A step that teaches only other numbers of nodes keeps this share of the steps that are known of a
number, and one that teaches only chains the second.  So a wide tree that was once unlucky is tried
again.
"""
_CARRIED = 48.0  # the most steps that earlier texts count
_DOUBT, _DOUBT_BESIDE = 2.0, 16.0
"""Steps that the estimate from narrower trees counts, and those that it counts for a tree of as
many nodes as a chain has.  The two differ little, and by far more in one step than in the mean.
"""
_HOPE, _LEAST_HOPE, _OPEN = 0.75, 0.05, 8.0
"""The least acceptance rate that is guessed before anything is known.  One step with many nodes
teaches all numbers of them, and few nodes teach little of many, so guesses err on the high side: by
half as much after `_OPEN` steps of fewer nodes, and by `_LEAST_HOPE` in the end.  What they may
cost is bounded by `Policy.most_debt`.
"""
_RATES = np.linspace(0.0, 1.0, 65, dtype=np.float32)


@struct.dataclass
class _Means:
    """Means over the last steps of a row."""

    drafts: Array  # [B, W] mean accepted drafts
    seen: Array  # [B, W] steps, with decaying weights

    @classmethod
    def start(cls, rows: int, widths: tuple[int, ...], known: Array | None = None) -> Self:
        """Returns the means at the start of a text; `known` [W, 2] is from `known` of others."""
        if known is None:
            known = jnp.zeros((len(widths), 2), jnp.float32)
        drafts, seen = (jnp.broadcast_to(each, (rows, len(widths))) for each in known.T)
        return cls(drafts, seen)

    def known(self) -> np.ndarray:
        """Returns [W, 2], on the host: the means over all rows, and the steps that they count."""
        drafts, seen = np.asarray(self.drafts), np.asarray(self.seen)
        mean = (drafts * seen).sum(0) / np.maximum(seen.sum(0), 1e-9)
        return np.stack([mean, np.minimum(seen.mean(0), _CARRIED)], axis=1).astype(np.float32)

    def _expected(
        self, index: int, guess: Array, doubt: float = _DOUBT, chain: Array | None = None
    ) -> Array:
        """Returns [B], the mean at an index, where a guess [B] counts as `doubt` steps.

        With the accepted drafts [B] of a chain, the means are what trees give more than it.
        """
        seen, known = self.seen[:, index], self.drafts[:, index]
        known = known if chain is None else known + chain
        return (known * seen + guess * doubt) / (seen + doubt)

    def _with(self, accepted: Array, known: Array, old: Array) -> Self:
        """Returns the means with what is known; `old` [B, W] are the steps of the others."""
        kept = 1 - 1 / _WINDOW
        seen = jnp.where(known, self.seen * kept + 1, old)
        step = (accepted - self.drafts) / jnp.maximum(seen, 1.0)
        return type(self)(self.drafts + jnp.where(known, step, 0.0), seen)


@struct.dataclass
class TreeGains(_Means):
    """The accepted drafts of the `width` best nodes of a row's trees, for each width.

    A tree that was drafted tells what each narrower one would have given, so that one step teaches
    all of them.  What a wider tree gives than was drafted yet follows from the acceptance rate at
    which a chain would give as much as the widest known one.

    If chains are options, too, and the text does not depend on what is drafted, `drafts` are the
    accepted drafts of a tree less those of the chain of first children in it.  The chain's own are
    learned by `ChainGains`, also in steps that draft no tree, and are added again by `tokens`.
    """

    def tokens(
        self,
        widths: tuple[int, ...],
        depth: int,
        rate: Array,
        shown: Array | None = None,
        chains: Sequence[Array] | None = None,
    ) -> Array:
        """Returns [B, W]: the expected tokens of a step, the target's own included.

        Args:
          widths: numbers of nodes, ascending from 1.
          depth: D, the depth of the trees.
          rate: [] or [B] the acceptance rate before anything is known of these numbers of nodes.
          shown: [B] the steps of others that told this rate; None: it is a prior, of no step.
          chains: [B] the accepted drafts of a chain of each width, up to the longest chain; None:
            nothing is known of chains.
        """
        rate = jnp.broadcast_to(rate, self.seen.shape[:1])
        shown = jnp.zeros_like(rate) if shown is None else shown
        found = [jnp.zeros_like(rate)]
        for index, width in enumerate(widths[1:], start=1):
            table = _gains(width, depth)
            guess = jnp.interp(_hoped(rate, shown), _RATES, table)
            if chains is None:
                mean = self._expected(index, guess)
            else:
                doubt = _DOUBT_BESIDE if index < len(chains) else _DOUBT
                mean = self._expected(index, guess, doubt, chains[min(index, len(chains) - 1)])
            found.append(jnp.maximum(mean, found[-1]))
            rate = jnp.interp(found[-1], table, _RATES)
            shown = jnp.maximum(shown, self.seen[:, index])
        return 1 + jnp.stack(found, axis=1)

    def after(self, accepted: Array, known: Array, chain: Array | None = None) -> Self:
        """Returns the means after a step.

        Args:
          accepted: [B, W] the drafts that would have been accepted with each width; beside chains,
            less those of the chain.
          known: [B, W] bool: is that known?
          chain: [B] bool: the step told of chains alone.
        """
        fades = jnp.where(known.any(1), _FADES, jnp.float32(1))
        if chain is not None:
            fades = jnp.where(chain, _FADES_BESIDE, fades)
        return self._with(accepted, known, self.seen * fades[:, None])


@struct.dataclass
class ChainGains(_Means):
    """The accepted drafts of a row's chains by *segment*: the drafts that a width adds to the last.

    `seen` are the steps in which all drafts before the segment were accepted, and `drafts` is the
    mean in these steps.  So a short chain tells of the first drafts of a long one.
    """

    def tokens(self, widths: tuple[int, ...], prior: Array) -> Array:
        """Returns [B, W]: the expected tokens of a step, the target's own included.

        Args:
          widths: numbers of nodes, ascending from 1.
          prior: [] the acceptance rate before anything is known.
        """
        return 1 + jnp.stack(self._drafts(widths, prior, hopeful=True), axis=1)

    def rate(self, widths: tuple[int, ...], prior: Array) -> tuple[Array, Array, list[Array]]:
        """Returns what is known of chains.

        Returns:
          The acceptance rate [B] of the longest chain, the steps [B] from which it is known, and
          for each width the expected accepted drafts [B].
        """
        drafts = self._drafts(widths, prior, hopeful=False)
        told = jnp.interp(drafts[-1], _gains(widths[-1], widths[-1] - 1), _RATES)
        return told, self.seen[:, 1], drafts

    def learned(self, accepted: Array, reached: Array, made: Array) -> Self:
        """Returns the means after a step.

        Args:
          accepted: [B, W] the accepted drafts of each segment.
          reached: [B, W] bool: it was drafted, and all drafts before it were accepted.
          made: [B, W] bool: it was drafted.  What is known of other segments fades.
        """
        fades = jnp.where(made.any(1, keepdims=True) & ~made, _FADES, jnp.float32(1))
        return self._with(accepted, reached, self.seen * fades)

    def _drafts(self, widths: tuple[int, ...], prior: Array, hopeful: bool) -> list[Array]:
        """Returns [B] the accepted drafts of each width."""
        rate = jnp.broadcast_to(prior, self.seen.shape[:1])
        reached, shown, found = jnp.ones_like(rate), jnp.zeros_like(rate), [jnp.zeros_like(rate)]
        for index, (before, width) in enumerate(itertools.pairwise(widths), start=1):
            more = width - before
            table = _gains(more + 1, more)
            guess = _hoped(rate, shown) if hopeful else rate
            mean = self._expected(index, jnp.interp(guess, _RATES, table))
            found.append(found[-1] + reached * mean)
            rate = jnp.interp(mean, table, _RATES)
            shown = jnp.maximum(shown, self.seen[:, index])
            reached = reached * rate**more
        return found


def _hoped(rate: Array, shown: Array) -> Array:
    """Returns [B] a guess above a rate [B] that was seen in `shown` [B] steps."""
    hope = jnp.maximum(_HOPE - rate, 0.0) * _OPEN / (shown + _OPEN)
    return rate + jnp.maximum(hope, _LEAST_HOPE)


def _gains(width: int, depth: int) -> np.ndarray:
    """Returns the accepted drafts of so many nodes at each of `_RATES`."""
    levels = min(width - 1, depth)
    # A tree with more nodes than levels gains a little by its siblings.
    more = (width - 1) ** 0.25 / levels**0.25
    return np.minimum(more * np.stack([_RATES**k for k in range(1, levels + 1)]).sum(0), levels)


@struct.dataclass
class LastTree:
    """The tree that was drafted last, all of it, also the nodes that the target did not read."""

    tokens: Array  # [B, N]
    parent: Array  # [B, N]
    place: Array  # [B, N] of each node among the best
    depth: Array  # [B] of its deepest level; 0: nothing was drafted
    text: Array  # [B, D + 1] tokens committed since, the root first
    count: Array  # [B] how many there are
    chain: Array  # [B] bool: it is a chain of first children

    @classmethod
    def none(cls, rows: int, num_nodes: int, depth: int) -> Self:
        nodes, zero = jnp.zeros((rows, num_nodes), jnp.int32), jnp.zeros(rows, jnp.int32)
        text = jnp.zeros((rows, depth + 1), jnp.int32)
        return cls(nodes, nodes + ABSENT, nodes, zero, text, zero, zero > 0)

    @classmethod
    def of(cls, proposal: Proposal, place: Array, depth: Array, chain: Array, like: Self) -> Self:
        none = like.count * 0
        return cls(proposal.tokens, proposal.parent, place, depth, like.text, none, chain)

    def forgotten(self) -> Self:
        """Returns this tree as if nothing had been drafted: nothing is learned from it."""
        return dataclasses.replace(self, depth=jnp.zeros_like(self.depth))

    @property
    def teaches(self) -> Array:
        """[B] bool: something was drafted, and a step has judged it."""
        return (self.depth > 0) & (self.count > 0)

    def right(self, pending: Array) -> tuple[Array, Array]:
        """Returns [B, N] bool, the nodes that the text went through, and the depth of each node.

        `pending` [B] is the next known token.
        """
        return right_nodes(self.tokens, self.parent, self.text, self.count, pending)

    def outcome(self, widths: tuple[int, ...], right: Array, depth: Array) -> tuple[Array, Array]:
        """Returns the arguments of `TreeGains.after`, of the best nodes."""
        sizes = np.array(widths)
        inside = self.place[..., None] < sizes
        accepted = jnp.where(right[..., None] & inside, depth[..., None], 0).max(1)
        deepest = self.text.shape[1] - 1
        levels = np.minimum(sizes - 1, deepest)
        # Of a chain nobody knows what its siblings would have given.
        learns = self.teaches & ~self.chain
        return accepted.astype(jnp.float32), learns[:, None] & (self.depth[:, None] >= levels)

    def chain_outcome(
        self, widths: tuple[int, ...], right: Array, depth: Array
    ) -> tuple[Array, Array, Array]:
        """Returns the arguments of `ChainGains.learned`, of the chain that every tree has."""
        number = jnp.arange(self.parent.shape[1])
        same = (self.parent[..., None] == self.parent[:, None]) & (number < number[:, None])
        present = (self.parent != ABSENT).at[:, 0].set(True)
        first = present & ~(same & present[:, None]).any(2)
        above = jax.vmap(tree.ancestor_mask)(self.parent)
        path = (first[:, None] | ~above).all(-1) & present
        taken = jnp.where(path & right, depth, 0).max(1)
        levels = np.array(widths) - 1
        before = np.array([0, *levels[:-1]])
        made = self.teaches[:, None] & (self.depth[:, None] >= levels)
        accepted = jnp.clip(taken[:, None] - before, 0, levels - before)
        return accepted.astype(jnp.float32), made & (taken[:, None] >= before), made
