"""`TreeGains`: the tokens of a step with the best nodes of a tree, for each number of nodes."""

from __future__ import annotations

import dataclasses
from typing import Self

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax.proposers.combine import right_nodes
from specjax.types import ABSENT, Proposal

_WINDOW = 64.0  # steps
_FADES = 1 - 1 / 16
"""A step that teaches only other numbers of nodes keeps this share of the steps that are known of a
number.  So a wide tree that was once unlucky is tried again.
"""
_DOUBT = 2.0  # steps that the estimate from narrower trees counts
_HOPE = 0.75
"""The least acceptance rate that is guessed.  One step with many nodes teaches all numbers of them,
and few nodes teach nothing of many, so guesses err on the high side.  What they may cost is bounded
by `Policy.most_debt`.
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
    def start(cls, rows: int, widths: tuple[int, ...]) -> Self:
        none = jnp.zeros((rows, len(widths)), jnp.float32)
        return cls(none, none)

    def tokens(self, widths: tuple[int, ...], depth: int, prior: Array) -> Array:
        """Returns [B, W]: the expected tokens of a step, the target's own included.

        Args:
          widths: numbers of nodes, ascending from 1.
          depth: D, the depth of the trees.
          prior: [] the acceptance rate before any draft was judged.
        """
        rate = jnp.broadcast_to(prior, self.seen.shape[:1])
        found = [jnp.zeros_like(rate)]
        for index, width in enumerate(widths[1:], start=1):
            # A tree of more nodes than a chain has levels gains a little by its siblings.
            levels = min(width - 1, depth)
            more = (width - 1) ** 0.25 / levels**0.25
            table = more * np.stack([_RATES**k for k in range(1, levels + 1)]).sum(0)
            guess = jnp.interp(jnp.maximum(rate, _HOPE), _RATES, table)
            seen, known = self.seen[:, index], self.drafts[:, index]
            mean = (known * seen + guess * _DOUBT) / (seen + _DOUBT)
            found.append(jnp.maximum(mean, found[-1]))
            rate = jnp.interp(found[-1], table, _RATES)
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

    @classmethod
    def none(cls, rows: int, num_nodes: int, depth: int) -> Self:
        nodes, zero = jnp.zeros((rows, num_nodes), jnp.int32), jnp.zeros(rows, jnp.int32)
        text = jnp.zeros((rows, depth + 1), jnp.int32)
        return cls(nodes, nodes + ABSENT, nodes, zero, text, zero)

    @classmethod
    def of(cls, proposal: Proposal, place: Array, depth: Array, like: Self) -> Self:
        return cls(proposal.tokens, proposal.parent, place, depth, like.text, like.count * 0)

    def forgotten(self) -> Self:
        """Returns this tree as if nothing had been drafted: nothing is learned from it."""
        return dataclasses.replace(self, depth=jnp.zeros_like(self.depth))

    def outcome(self, widths: tuple[int, ...], pending: Array) -> tuple[Array, Array]:
        """Returns the arguments of `TreeGains.after`; `pending` [B] is the next known token."""
        right, depth = right_nodes(self.tokens, self.parent, self.text, self.count, pending)
        sizes = np.array(widths)
        inside = self.place[..., None] < sizes
        accepted = jnp.where(right[..., None] & inside, depth[..., None], 0).max(1)
        deepest = self.text.shape[1] - 1
        levels = np.minimum(sizes - 1, deepest)
        known = (self.depth[:, None] >= levels) & (self.depth > 0)[:, None]
        return accepted.astype(jnp.float32), known & (self.count > 0)[:, None]
