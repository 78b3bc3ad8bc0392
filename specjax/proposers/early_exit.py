"""`early_exit`: the first layers of the target guess a chain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from specjax.caches import KVCache
from specjax.models import LinenModel, TransformerConfig
from specjax.proposers.chain import ModelChain
from specjax.types import Block, Model, Proposal


@dataclasses.dataclass(frozen=True)
class EarlyExit(ModelChain):
    """`num_drafts` tokens, drawn one after the other from the first `exit_layer` layers of the target.

    Its parameters are the target's own: the layers, the final norm and the head.  It has no cache either, but guesses
    in the target's, behind its length, where the target stages its pass next: there is no prompt to read, and nothing
    to catch up with.

    Any target will do, but one that was trained with losses at its inner layers guesses better.

    Reference: Elhoushi et al. 2024 (LayerSkip), arXiv 2404.16710, section 4.3: self-speculative decoding.
    """

    target: Model
    exit_layer: int
    num_drafts: int = 4
    confidence_threshold: float = 0.0
    shares_cache = True

    def __post_init__(self):
        super().__post_init__()
        config = getattr(getattr(self.target, "module", None), "config", None)
        if not isinstance(config, TransformerConfig):
            raise ValueError(f"an early exit needs a target over specjax.Transformer, and not {self.target}")
        if not 1 <= self.exit_layer < config.num_layers:
            raise ValueError(
                f"exit_layer={self.exit_layer}; the target has {config.num_layers} layers, "
                f"so it must lie in [1, {config.num_layers - 1}]"
            )

    @property
    def model(self) -> LinenModel:
        """The target without its last layers."""
        module: Any = self.target.module  # type: ignore[attr-defined]
        config = module.config.truncated(self.exit_layer)
        return dataclasses.replace(self.target, module=module.clone(config=config))  # type: ignore[arg-type]

    def init(self, params: Any, prompt: Block, capacity: int) -> tuple:
        return ()

    def observe(self, params: Any, state: tuple, block: Block) -> tuple:
        return state

    def propose(
        self, params: Any, state: KVCache, pending: Array, draw: Any, warp: Callable[..., Array]
    ) -> tuple[Proposal, KVCache]:
        model = self.model

        def read(cache, tokens):
            out = model.apply(params, tokens[:, None], cache.length[:, None], cache)
            return out.cache.commit(jnp.ones_like(cache.length)), out.logits[:, 0].astype(jnp.float32)

        first = dataclasses.replace(state, keys=state.keys[: self.exit_layer], values=state.values[: self.exit_layer])
        proposal, first = self._look_ahead(read, *read(first, pending), pending, draw, warp)
        keys, values = first.keys + state.keys[self.exit_layer :], first.values + state.values[self.exit_layer :]
        return proposal, dataclasses.replace(state, keys=keys, values=values)
