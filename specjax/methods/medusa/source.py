"""`MedusaSource`: heads on the target's hidden states; each row chooses its own adapter."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax._internal.checks import counts, listed, typed
from specjax.contract import BlockSource, Context, Loaded
from specjax.methods.medusa.network import MedusaHeads, medusa_hidden, medusa_logits
from specjax.models import Tables, head_matrix
from specjax.proposers import Choices, ChoiceTree
from specjax.types import Block, Weights


@struct.dataclass
class MedusaParams:
    """Parameters of a bank of A adapters, and the adapter of each row.

    `adapter` is read only by `Decoder.prefill`, which copies it into the state of the rows.
    """

    bank: Weights  # parameters of `MedusaHeads`, stacked: every leaf [A, ...]
    adapter: Array  # [B] int32, or one for all rows; -1 is plain decoding
    # The target's, for `models.head_matrix`; None if heads have their own.
    output: Tables | dict[str, object] | None = None


@struct.dataclass
class MedusaState:
    hidden: Array  # [B, E] hidden state of the last token that the target has read
    known: Array  # [B] bool; has the target read any token yet?
    adapter: Array  # [B] int32


@dataclasses.dataclass(frozen=True)
class MedusaSource(BlockSource[MedusaParams, MedusaState, MedusaState, None]):
    """Medusa heads as a source: head k (from 0) predicts the token k + 1 after the pending one.

    The input of all heads is the target's last hidden state at the token before the pending one.
    They do not condition on each other's drafts, so all nodes of a depth share a distribution.

    One compiled program serves rows with different adapters, rows with none, and rows that have
    only a pending token so far.

    Reference: Cai et al. 2024, arXiv 2401.10774.
    """

    heads: MedusaHeads
    waits = True

    def __post_init__(self) -> None:
        self.declare(vocab_size=self.heads.vocab_size, depth=self.heads.num_heads)

    def bind(self, target: Loaded, draft: Loaded | None) -> MedusaParams:
        raise ValueError(
            "a Medusa proposer comes without its weights: pass what specjax.load_medusa returns"
        )

    def init(self, params: MedusaParams, prompt: Block, capacity: int) -> MedusaState:
        del capacity
        if jnp.size(params.adapter) != 1 and jnp.shape(params.adapter) != prompt.count.shape:
            raise ValueError(
                f"adapter has {len(params.adapter)} values for {len(prompt.count)} rows; "
                "pass one per row"
            )
        adapter = jnp.broadcast_to(params.adapter, prompt.count.shape).astype(jnp.int32)
        hidden, known = jnp.zeros_like(prompt.hidden[:, 0]), jnp.zeros(prompt.count.shape, bool)
        return MedusaState(hidden, known, adapter)

    def truncate(self, state: MedusaState, count: Array, last: Array | None) -> MedusaState:
        # The heads need the hidden state of the last token, which is read after these.
        return dataclasses.replace(state, known=jnp.zeros_like(state.known))

    def adapt(self, state: MedusaState, adapter: Array) -> MedusaState:
        return dataclasses.replace(state, adapter=adapter)

    def observe(self, params: MedusaParams, state: MedusaState, block: Block) -> MedusaState:
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

        def add(index: Array, outputs: Array) -> Array:
            uses = state.adapter == index

            def apply(outputs: Array) -> Array:
                arrays = jax.tree.map(lambda leaf: leaf[index], params.bank)
                new = medusa_hidden(heads, arrays, state.hidden)
                return jnp.where(uses[:, None, None], new.astype(outputs.dtype), outputs)

            return jax.lax.cond(uses.any(), apply, lambda outputs: outputs, outputs)

        # A gather would copy the heads for every row.  This loop reads each adapter once, and skips
        # those that no row uses.
        count = len(jax.tree.leaves(params.bank)[0])
        outputs = jnp.zeros((rows, heads.num_heads, width), state.hidden.dtype)
        outputs = jax.lax.fori_loop(0, count, add, outputs)
        output = None if heads.own_heads else params.output
        target_head = None if output is None else head_matrix(output)
        logits = medusa_logits(heads, outputs, target_head)
        return logits, state.known & (state.adapter >= 0), state


def Medusa(heads: MedusaHeads, choices: Choices | Sequence[Sequence[int]] = ()) -> ChoiceTree:
    """Drafts a tree of choices with Medusa heads: `ChoiceTree(MedusaSource(heads), choices)`.

    Example:
      >>> target = specjax.load(specjax.shipped("pycode/target"))
      >>> heads = specjax.load_medusa(specjax.shipped("pycode/medusa"), target)
      >>> specjax.Medusa(heads.proposer.source.heads, [(0,), (0, 0), (1,)]).num_nodes
      4
    """
    typed("specjax.models.MedusaHeads", MedusaHeads, heads=heads)
    cure = "a list of paths, as [[0], [1], [0, 0]]"
    paths = [listed("choices", path, cure) for path in listed("choices", choices, cure)]
    for path in paths:
        for rank in path:
            counts(choices=rank)
    return ChoiceTree(MedusaSource(heads), tuple(map(tuple, paths)))
