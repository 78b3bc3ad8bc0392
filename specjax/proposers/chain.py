"""What proposers have in common: the shape of a chain, catching up with the target, and looking ahead."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax import sampling, tree
from specjax.types import ABSENT, Block, Proposal


class Chain:
    """A mixin for a frozen dataclass with a field `num_drafts` (gamma)."""

    num_drafts: int
    is_chain = True

    def __post_init__(self):
        if self.num_drafts < 1:
            raise ValueError(f"num_drafts={self.num_drafts}; it must be at least 1")

    @property
    def num_nodes(self) -> int:
        """The drafts and the root."""
        return self.num_drafts + 1

    @property
    def max_depth(self) -> int:
        return self.num_drafts


class CatchUp:
    """A mixin for those that ask a model of their own, which has to read what the target commits.

    Their state has the fields `fresh` [B, max_depth + 1], tokens that the target committed and the model has not read,
    and `count` [B], how many.
    """

    def observe(self, params: Any, state: Any, block: Block) -> Any:
        width = min(state.fresh.shape[1], block.tokens.shape[1])
        return dataclasses.replace(
            state, fresh=state.fresh.at[:, :width].set(block.tokens[:, :width]), count=block.count
        )

    def _unread(self, state: Any, pending: Array) -> Array:
        """[B, T + 1]: the fresh tokens [B, T], then the pending one."""
        return jnp.pad(state.fresh, ((0, 0), (0, 1))).at[jnp.arange(len(pending)), state.count].set(pending)


class ModelChain(CatchUp, Chain):
    """A mixin for chains that a model draws.

    With a `confidence_threshold` in (0, 1] a chain ends behind the first token to which the model gives, before any
    setting of the row, less probability than that.  The unlikely token itself stays: whether a guess is made may depend
    on the guesses before it and not on its own outcome, or rejection sampling would be biased.
    """

    confidence_threshold: float = 0.0
    draws = True

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.confidence_threshold <= 1:
            raise ValueError(
                f"confidence_threshold={self.confidence_threshold}; it is a probability in [0, 1], and 0 never stops"
            )

    def _look_ahead(
        self, read: Callable, cache: Any, logits: Array, pending: Array, draw: Any, warp: Callable[..., Array]
    ) -> tuple[Proposal, Any]:
        """Draw a chain, one token after the other.

        Args:
          read: (cache, tokens [B]) -> the cache with them, and logits [B, V] after them.
          cache: up to the pending token.
          logits: [B, V] after the pending token, on the target's vocabulary.

        Returns:
          The proposal, and the cache with all drafts but the last.
        """
        tokens, drawn_from, going = [pending], [], [jnp.ones_like(pending, bool)] * 2
        for node in range(self.num_drafts):
            warped = warp(logits[:, None], jnp.stack(tokens, axis=1)[:, None, 1:])[:, 0]
            noise = jax.vmap(lambda d, node=node: d.noise(node, node))(draw)
            tokens.append(sampling.argmax(warped + noise))
            drawn_from.append(warped)
            if node + 1 == self.num_drafts:
                break
            if self.confidence_threshold == 0:
                cache, logits = read(cache, tokens[-1])
                continue
            sure = jnp.take_along_axis(jax.nn.softmax(logits), tokens[-1][:, None], axis=1)[:, 0]
            going.append(going[-1] & (sure >= self.confidence_threshold))
            # Once no row goes on, the passes of the model are spared.
            cache, logits = jax.lax.cond(
                going[-1].any(), read, lambda cache, _, logits=logits: (cache, logits), cache, tokens[-1]
            )
        parent = jnp.broadcast_to(tree.chain(self.num_nodes), (len(pending), self.num_nodes))
        if self.confidence_threshold > 0:
            parent = jnp.where(jnp.stack(going, axis=1), parent, ABSENT)
        # Nothing is drawn below the last node; under shared noise nobody asks what the guesses were drawn from.
        all_logits = None if draw.shared else jnp.stack([*drawn_from, drawn_from[-1]], axis=1)
        return Proposal(jnp.stack(tokens, axis=1), parent, all_logits), cache
