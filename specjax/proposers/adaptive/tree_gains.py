"""`TreeGains`: the tokens of a step with the best nodes of a tree, for each number of nodes."""

from __future__ import annotations

import dataclasses
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
_FADES = 1 - 1 / 48
"""A step that teaches only other numbers of nodes keeps this share of the steps that are known of a
number.  So a wide tree that was once unlucky is tried again.
"""
_CARRIED = 48.0  # the most steps that earlier texts count
_DOUBT = 2.0  # steps that the estimate from narrower trees counts
_HOPE, _LEAST_HOPE, _OPEN = 0.75, 0.05, 8.0
"""The least acceptance rate that is guessed before anything is known.  One step with many nodes
teaches all numbers of them, and few nodes teach little of many, so guesses err on the high side: by
half as much after `_OPEN` steps of fewer nodes, and by `_LEAST_HOPE` in the end.  What they may
cost is bounded by `Policy.most_debt`.
"""
_RATES = np.linspace(0.0, 1.0, 65, dtype=np.float32)


@struct.dataclass
class TreeGains:
    """Means over the last steps of a row, each for the `width` best nodes of its trees.

    A tree that was drafted tells what each narrower one would have given, so that one step teaches
    all of them.  What a wider tree gives than was drafted yet follows from the acceptance rate at
    which a chain would give as much as the widest known one.
    """

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

    def tokens(self, widths: tuple[int, ...], depth: int, prior: Array) -> Array:
        """Returns [B, W]: the expected tokens of a step, the target's own included.

        Args:
          widths: numbers of nodes, ascending from 1.
          depth: D, the depth of the trees.
          prior: [] the acceptance rate before any draft was judged.
        """
        rate = jnp.broadcast_to(prior, self.seen.shape[:1])
        found, shown = [jnp.zeros_like(rate)], jnp.zeros_like(rate)
        for index, width in enumerate(widths[1:], start=1):
            # A tree of more nodes than a chain has levels gains a little by its siblings.
            levels = min(width - 1, depth)
            more = (width - 1) ** 0.25 / levels**0.25
            table = more * np.stack([_RATES**k for k in range(1, levels + 1)]).sum(0)
            hope = jnp.maximum(_HOPE - rate, 0.0) * _OPEN / (shown + _OPEN)
            guess = jnp.interp(rate + jnp.maximum(hope, _LEAST_HOPE), _RATES, table)
            seen, known = self.seen[:, index], self.drafts[:, index]
            mean = (known * seen + guess * _DOUBT) / (seen + _DOUBT)
            found.append(jnp.maximum(mean, found[-1]))
            rate, shown = jnp.interp(found[-1], table, _RATES), jnp.maximum(shown, seen)
        return 1 + jnp.stack(found, axis=1)

    def after(self, accepted: Array, known: Array) -> Self:
        """Returns the means after a step.

        Args:
          accepted: [B, W] the drafts that would have been accepted with each width.
          known: [B, W] bool: is that known?
        """
        kept = 1 - 1 / _WINDOW
        learned = known.any(1, keepdims=True)
        old = jnp.where(learned, self.seen * _FADES, self.seen)
        seen = jnp.where(known, self.seen * kept + 1, old)
        step = (accepted - self.drafts) / jnp.maximum(seen, 1.0)
        return type(self)(self.drafts + jnp.where(known, step, 0.0), seen)


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
        known = (self.depth[:, None] >= levels) & (self.depth > 0)[:, None]
        # Of a chain nobody knows what its siblings would have given.
        known &= ~self.chain[:, None]
        return accepted.astype(jnp.float32), known & (self.count > 0)[:, None]

    def chain_outcome(
        self, widths: tuple[int, ...], right: Array, depth: Array
    ) -> tuple[Array, Array]:
        """Returns the same of chains of first children, which every tree has."""
        number = jnp.arange(self.parent.shape[1])
        same = (self.parent[..., None] == self.parent[:, None]) & (number < number[:, None])
        present = (self.parent != ABSENT).at[:, 0].set(True)
        first = present & ~(same & present[:, None]).any(2)
        above = jax.vmap(tree.ancestor_mask)(self.parent)
        path = (first[:, None] | ~above).all(-1) & present
        taken = jnp.where(path & right, depth, 0).max(1)
        levels = jnp.array(widths) - 1
        # What failed early says nothing of deeper drafts that were not made: those that went on
        # would be left out.
        known = (self.depth[:, None] >= levels) & (self.depth > 0)[:, None]
        accepted = jnp.minimum(taken[:, None], levels)
        return accepted.astype(jnp.float32), known & (self.count > 0)[:, None]
