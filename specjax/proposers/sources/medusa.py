"""`medusa`: heads on the target's hidden states; every row has the heads of its own adapter."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.contract import BlockSource, Context, Loaded
from specjax.models import MedusaHeads, head_matrix, medusa_features, medusa_logits
from specjax.types import Block


@struct.dataclass
class MedusaParams:
    """Arrays of a bank of A adapters, and which of them each row asks for.

    `Decoder.prefill` reads `adapter` for the rows that it is given, and keeps it in their state;
    later steps take any.
    """

    bank: Any  # of `MedusaHeads`, stacked: every leaf [A, ...]
    adapter: Array  # [B] int32, or one for all rows; -1: none, the row decodes plainly
    output: Any = None  # of the target, for `models.head_matrix`; None where heads have their own


@struct.dataclass
class MedusaState:
    hidden: Array  # [B, E] hidden state of the last token that the target has read
    known: Array  # [B] bool; has it read any?
    adapter: Array  # [B] int32


@dataclasses.dataclass(frozen=True)
class MedusaSource(BlockSource):
    """Head k draws the token k + 1 places behind the pending one.

    The heads see the target's last hidden state at the token before the pending one.  They do not
    see each other's drafts: all nodes of a depth share a distribution.

    Rows with different adapters or none, and rows that have nothing but a pending token yet, share
    one program.

    Reference: Cai et al. 2024, arXiv 2401.10774.
    """

    heads: MedusaHeads

    def __post_init__(self):
        self.declare(vocab_size=self.heads.vocab_size, depth=self.heads.num_heads)

    def bind(self, target: Loaded, draft: Loaded | None) -> Any:
        raise ValueError(
            "a Medusa comes without its weights: pass what specjax.load_medusa returns instead"
        )

    def init(self, params: MedusaParams, prompt: Block, capacity: int) -> MedusaState:
        del capacity
        if jnp.size(params.adapter) != 1 and jnp.shape(params.adapter) != prompt.count.shape:
            raise ValueError(
                f"adapter has {len(params.adapter)} values for {len(prompt.count)} rows; pass one a row"
            )
        adapter = jnp.broadcast_to(params.adapter, prompt.count.shape).astype(jnp.int32)
        hidden, known = jnp.zeros_like(prompt.hidden[:, 0]), jnp.zeros(prompt.count.shape, bool)
        return self.observe(params, MedusaState(hidden, known, adapter), prompt)

    def observe(self, params: Any, state: MedusaState, block: Block) -> MedusaState:
        last = jnp.maximum(block.count - 1, 0)[:, None, None]
        hidden = jnp.take_along_axis(block.hidden, last, axis=1)[:, 0]
        read = block.count > 0
        hidden = jnp.where(read[:, None], hidden, state.hidden)
        return dataclasses.replace(state, hidden=hidden, known=state.known | read)

    def marginals(
        self, params: MedusaParams, state: MedusaState, context: Context
    ) -> tuple[Array, Array, MedusaState]:
        rows, heads = len(state.hidden), self.heads
        width = heads.vocab_size if heads.own_heads else heads.hidden_size

        def one(index: Array, made: Array) -> Array:
            mine = state.adapter == index

            def ask(made: Array) -> Array:
                arrays = jax.tree.map(lambda leaf: leaf[index], params.bank)
                new = medusa_features(heads, arrays, state.hidden)
                return jnp.where(mine[:, None, None], new.astype(made.dtype), made)

            return jax.lax.cond(mine.any(), ask, lambda made: made, made)

        # A gather would copy each row's heads; this loop reads an adapter once, and only if asked for.
        count = len(jax.tree.leaves(params.bank)[0])
        made = jnp.zeros((rows, heads.num_heads, width), state.hidden.dtype)
        made = jax.lax.fori_loop(0, count, one, made)
        logits = medusa_logits(heads, made, None if heads.own_heads else head_matrix(params.output))
        return logits, state.known & (state.adapter >= 0), state
