"""A Flax Linen module as a `contract.Model`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike

from specjax.caches import KVCache
from specjax.contract import Model
from specjax.types import ModelOutput, Weights

PRECISIONS = ("default", "high", "highest")
"""The precisions of products of float32 matrices.

On a TPU these are 1, 3 and 6 passes of bfloat16, and on a GPU TensorFloat-32 or float32.  A CPU
computes in float32 anyway.  Products of bfloat16 matrices are the same with each.
"""


@dataclasses.dataclass(frozen=True)
class LinenModel(Model[Weights, KVCache]):
    """A module whose `__call__(tokens, positions, cache, mask, taps)` returns a `ModelOutput`.

    The module also offers `vocab_size`, `max_positions`, `num_taps` and
    `init_cache(batch, size, dtype)`.  Equal modules make equal models, which share compiled
    functions.
    """

    module: nn.Module
    dtype: DTypeLike = jnp.float32  # of the cache
    precision: str | None = None  # of matrix products, one of `PRECISIONS`; None is JAX's default
    cache_dtype: str | None = None  # "int8" or "float8": its keys and values are rounded

    reads_trees = True

    def __post_init__(self) -> None:
        module = self.module
        self.declare(
            vocab_size=module.vocab_size,
            max_positions=module.max_positions,
            num_taps=module.num_taps,
            sparse=getattr(module, "sparse", False),
            one_cpu=getattr(module, "one_cpu", False),
            triton=getattr(module, "triton", False),
        )

    def init(self, key: Array) -> Weights:
        """Returns random parameters: a plain dict of arrays, without partitioning metadata."""
        return _init(self.module, key)

    def init_cache(self, batch: int, size: int) -> KVCache:
        cache = self.module.init_cache(batch, size, self.dtype)
        name = self.cache_dtype
        if name is None:
            return cache
        return jax.tree.map(
            lambda x: x.rounded(name) if isinstance(x, KVCache) else x,
            cache,
            is_leaf=lambda x: isinstance(x, KVCache),
        )

    def apply(
        self,
        params: Weights,
        tokens: Array,
        positions: Array,
        cache: KVCache | None = None,
        mask: Array | None = None,
        taps: tuple[int, ...] = (),
    ) -> ModelOutput[KVCache]:
        with contextlib.ExitStack() as stack:
            if self.precision is not None:
                stack.enter_context(jax.default_matmul_precision(self.precision))
            out = self.module.apply({"params": params}, tokens, positions, cache, mask, taps)
        return cast("ModelOutput[KVCache]", out)


@functools.partial(jax.jit, static_argnums=0)
def _init(module: nn.Module, key: Array) -> Weights:
    tokens = jnp.zeros((1, 1), jnp.int32)
    return nn.meta.unbox(module.init(key, tokens, tokens))["params"]
