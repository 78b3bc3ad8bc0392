"""`MapSource`: the next token follows from the embedding of the pending one."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from specjax.contract import BlockSource, Context, Loaded
from specjax.methods.published import PublishedSource, SharedParams, embedding_of, head_of
from specjax.models import TransformerConfig
from specjax.types import Block


@dataclasses.dataclass(frozen=True)
class MapSource(BlockSource, PublishedSource):
    """The logits at depth d are H M_d e, of the pending token's embedding e and the head H."""

    config: TransformerConfig
    vocab_size: int
    depth: int

    @property
    def layers(self) -> TransformerConfig:
        return self.config

    def axes(self) -> dict[str, Any]:
        return {"map": PartitionSpec(None, "embed", None)}

    def bind(self, target: Loaded, draft: Loaded | None) -> Any:
        raise ValueError("a map comes without its weights: pass what specjax.load_drafter returns")

    def init(self, params: Any, prompt: Block, capacity: int) -> Any:
        return ()

    def marginals(
        self, params: SharedParams, state: Any, context: Context
    ) -> tuple[Array, Array, Any]:
        embedded = embedding_of(params)[context.pending]
        hidden = jnp.einsum("be,def->bdf", embedded, params.own["map"])
        return hidden @ head_of(params), jnp.ones(len(hidden), bool), ()

    def observe(self, params: Any, state: Any, block: Block) -> Any:
        return ()
