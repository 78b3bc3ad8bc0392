"""`OwnText`: the tokens that proposers look up in, those of a row itself and of its documents."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.types import Block


@struct.dataclass
class OwnText:
    """The documents of each row, and behind them its text so far without the pending token."""

    tokens: Array  # [B, documents + capacity + ahead] int32; ABSENT around each document
    length: Array  # [B] int32; of both together, padding of the documents included

    @classmethod
    def of(cls, prompt: Block, capacity: int, ahead: int) -> OwnText:
        """Those of a prompt, with room for `capacity` tokens and `ahead` tokens behind them."""
        rows, width = prompt.tokens.shape
        text = jnp.zeros((rows, capacity + ahead), jnp.int32).at[:, :width].set(prompt.tokens)
        if prompt.documents is None:
            return cls(text, prompt.count)
        tokens = jnp.concatenate([prompt.documents, text], axis=1)
        return cls(tokens, prompt.count + prompt.documents.shape[1])

    def append(self, block: Block) -> OwnText:
        """With the tokens of a block that was committed."""
        tokens = jax.vmap(lambda text, new, at: jax.lax.dynamic_update_slice(text, new, (at,)))(
            self.tokens, block.tokens, self.length
        )
        return OwnText(tokens, self.length + block.count)
