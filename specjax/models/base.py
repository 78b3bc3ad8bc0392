"""A Flax Linen module as a `contract.Model`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from specjax.contract import Model
from specjax.types import ModelOutput


@dataclasses.dataclass(frozen=True)
class LinenModel(Model):
    """A module whose `__call__(tokens, positions, cache, mask, taps)` returns a `ModelOutput`.

    The module also offers `vocab_size`, `max_positions`, `num_taps` and
    `init_cache(batch, size, dtype)`.  Equal modules make
    equal models, so a compiled function is found again.
    """

    module: Any  # flax.linen.Module
    dtype: Any = jnp.float32  # of the cache

    reads_trees = True

    def __post_init__(self):
        module = self.module
        self.declare(
            vocab_size=module.vocab_size,
            max_positions=module.max_positions,
            num_taps=module.num_taps,
        )

    def init(self, key: Array) -> Any:
        """Random parameters, a plain dict of arrays (partitioning metadata removed)."""
        tokens = jnp.zeros((1, 1), jnp.int32)
        return nn.meta.unbox(jax.jit(self.module.init)(key, tokens, tokens))["params"]

    def init_cache(self, batch: int, size: int) -> Any:
        return self.module.init_cache(batch, size, self.dtype)

    def apply(
        self,
        params: Any,
        tokens: Array,
        positions: Array,
        cache: Any = None,
        mask: Array | None = None,
        taps: tuple[int, ...] = (),
    ) -> ModelOutput:
        return self.module.apply({"params": params}, tokens, positions, cache, mask, taps)
