"""`OwnText`: the tokens that prompt lookup searches, those of a row itself and of its documents."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax._internal.row_writes import write
from specjax.types import Block


@struct.dataclass
class OwnText:
    """The documents of each row, followed by its text so far without the pending token."""

    tokens: Array  # [B, documents + capacity + ahead] int32; ABSENT around each document
    length: Array  # [B] int32; of both together, padding of the documents included
    documents: int = struct.field(pytree_node=False, default=0)  # their width

    @classmethod
    def empty(cls, prompt: Block, capacity: int, ahead: int) -> OwnText:
        """Returns the documents of a prompt, with space for `capacity` tokens and `ahead` more."""
        text = jnp.zeros((len(prompt.tokens), capacity + ahead), jnp.int32)
        none = jnp.zeros_like(prompt.count)
        if prompt.documents is None:
            return cls(text, none)
        width = prompt.documents.shape[1]
        return cls(jnp.concatenate([prompt.documents, text], axis=1), none + width, width)

    def first(self, count: Array) -> OwnText:
        """Returns the documents and the first `count` [B] of the tokens after them."""
        return dataclasses.replace(self, length=count + self.documents)

    def append(self, block: Block) -> OwnText:
        """Returns the text with the tokens of a committed block appended."""
        tokens = write(self.tokens, block.tokens, self.length)
        return dataclasses.replace(self, tokens=tokens, length=self.length + block.count)
