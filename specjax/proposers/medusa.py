"""`medusa`: heads on the target's own features guess a tree at once; every row has heads of its own choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax import sampling, tree
from specjax.models import MedusaHeads, head_matrix, medusa_features, medusa_logits
from specjax.proposers.choices import Choices, best_tree, measure_ranks
from specjax.types import ABSENT, Block, Proposal

__all__ = ["Medusa", "MedusaParams", "MedusaState", "best_tree", "measure_ranks"]


@struct.dataclass
class MedusaParams:
    """Arrays of a bank of A adapters, and which of them each row asks for.

    `adapter` is read by `Decoder.prefill`, for the rows that it is given, and kept in their state; later steps take
    any.
    """

    bank: Any  # of `MedusaHeads`, stacked: every leaf [A, ...]
    adapter: Array  # [B] int32, or one for all rows; -1: none, the row decodes plainly
    output: Any = None  # of the target: what `models.transformer.head_matrix` asks for; None where heads have their own


@struct.dataclass
class MedusaState:
    hidden: Array  # [B, E] features of the last token that the target has read
    known: Array  # [B] bool; has it read any?
    adapter: Array  # [B] int32


@dataclasses.dataclass(frozen=True)
class Medusa:
    """The choice (i, j) is the j-th best guess of the second head below the i-th best of the first.

    The heads see what the target felt at the last token it read, the one before the pending token, so the first of them
    guesses behind the pending one.  They do not see each other's guesses: all nodes of a depth share a distribution.

    Siblings are the tokens of greatest logit + noise: under shared noise the best guesses at the target's own draw,
    with noise of their parent's own a draw without replacement (Kool et al. 2019, arXiv 1903.06059, section 3).

    Rows with different adapters or none, and rows that have nothing but a pending token yet, share one program.

    Reference: Cai et al. 2024, arXiv 2401.10774.

    Attributes:
      heads: their form.
      choices: the tree, kept in the order of its nodes; () is a chain of the best guesses of all heads.
    """

    heads: MedusaHeads
    choices: Choices = ()
    draws = True

    def __post_init__(self):
        k, size = self.heads.num_heads, self.heads.vocab_size
        choices = tuple(tuple(map(int, choice)) for choice in self.choices) or tuple((0,) * n for n in range(1, k + 1))
        object.__setattr__(self, "choices", tuple(sorted(choices, key=lambda choice: (len(choice), choice))))
        tree.from_choices(choices)
        for choice in choices:
            if len(choice) > k:
                raise ValueError(
                    f"choice {choice} lies {len(choice)} tokens ahead, and there are {k} heads: leave it out"
                )
            if not 0 <= max(choice) < size:
                raise ValueError(f"choice {choice} asks for more guesses than the vocabulary of {size} tokens has")

    @property
    def num_nodes(self) -> int:
        return len(self.choices) + 1

    @property
    def max_depth(self) -> int:
        return max(map(len, self.choices))

    @property
    def is_chain(self) -> bool:
        return self.max_depth == len(self.choices)

    def init(self, params: MedusaParams, prompt: Block, capacity: int) -> MedusaState:
        del capacity
        if jnp.size(params.adapter) != 1 and jnp.shape(params.adapter) != prompt.count.shape:
            raise ValueError(f"adapter has {len(params.adapter)} values for {len(prompt.count)} rows; pass one a row")
        adapter = jnp.broadcast_to(params.adapter, prompt.count.shape).astype(jnp.int32)
        hidden, known = jnp.zeros_like(prompt.hidden[:, 0]), jnp.zeros(prompt.count.shape, bool)
        return self.observe(params, MedusaState(hidden, known, adapter), prompt)

    def observe(self, params: Any, state: MedusaState, block: Block) -> MedusaState:
        last = jnp.maximum(block.count - 1, 0)[:, None, None]
        hidden = jnp.take_along_axis(block.hidden, last, axis=1)[:, 0]
        read = block.count > 0
        hidden = jnp.where(read[:, None], hidden, state.hidden)
        return dataclasses.replace(state, hidden=hidden, known=state.known | read)

    def propose(
        self, params: MedusaParams, state: MedusaState, pending: Array, draw: Any, warp: Callable[[Array], Array]
    ) -> tuple[Proposal, MedusaState]:
        parent = tree.from_choices(self.choices)
        depth = np.array([0, *map(len, self.choices)])
        above = parent[1:]
        # Siblings are drawn together; under shared noise all siblings of a depth are the same tokens.
        _, first, group = np.unique(depth[above] if draw.shared else above, return_index=True, return_inverse=True)
        asked = above[first]
        rank = np.array([choice[-1] for choice in self.choices])

        logits = self._ask(params, state)
        warped = warp(logits)
        noise = jax.vmap(lambda d: jax.vmap(d.noise)(asked, depth[asked]))(draw)
        score = sampling.scores(logits[:, depth[asked]], warped[:, depth[asked]], noise)
        _, found = jax.lax.top_k(score, int(rank.max()) + 1)
        tokens = jnp.concatenate([pending[:, None], found[:, group, rank]], axis=1)

        present = (state.known & (state.adapter >= 0))[:, None]
        # Nothing is drawn below the last level; under shared noise nobody asks what the guesses were drawn from.
        drawn_from = None if draw.shared else warped[:, np.minimum(depth, self.max_depth - 1)]
        return Proposal(tokens, jnp.where(present, parent, ABSENT), drawn_from), state

    def _ask(self, params: MedusaParams, state: MedusaState) -> Array:
        """[B, D, V] logits of every row's own heads."""
        rows, heads = len(state.hidden), self.heads
        width = heads.vocab_size if heads.own_heads else heads.hidden_size

        def one(index, found):
            mine = state.adapter == index

            def ask(found):
                arrays = jax.tree.map(lambda leaf: leaf[index], params.bank)
                new = medusa_features(heads, arrays, state.hidden)
                return jnp.where(mine[:, None, None], new.astype(found.dtype), found)

            return jax.lax.cond(mine.any(), ask, lambda found: found, found)

        # A gather of each row's heads would copy them for every row; this reads an adapter once, and only if asked for.
        count = len(jax.tree.leaves(params.bank)[0])
        found = jnp.zeros((rows, heads.num_heads, width), state.hidden.dtype)
        found = jax.lax.fori_loop(0, count, one, found)[:, : self.max_depth]
        return medusa_logits(heads, found, None if heads.own_heads else head_matrix(params.output))
