"""Bring your own model: a plain function (also for Equinox), a Linen module or an NNX model.

Without `init_cache`, a model is a function `tokens [B, T] -> logits [B, T, V]` of the whole text.
Every pass then reads the whole text again, which is exact but slow.  With `init_cache`, the model
has a cache.  `specjax.models.function` describes both contracts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Required, TypedDict, Unpack

import jax
from flax import linen as nn
from jax import Array

from specjax.contract import Cache, Model
from specjax.models.function import CachedModel, RereadingModel
from specjax.types import ArrayTree

if TYPE_CHECKING:
    from flax import nnx


class _Settings(TypedDict, total=False):
    """The keyword arguments of `from_function`."""

    vocab_size: Required[int]
    max_positions: Required[int]
    init_cache: Callable[[int, int], Cache] | None
    reads_trees: bool


def from_function(
    function: Callable[..., Any],
    *,
    vocab_size: int,
    max_positions: int,
    init_cache: Callable[[int, int], Cache] | None = None,
    reads_trees: bool = True,
) -> Model[ArrayTree, Cache]:
    """Makes a model from a pure function.

    For an Equinox model, split it into arrays and structure:

        params, static = eqx.partition(net, eqx.is_array)

        def read(params, tokens):
            return jax.vmap(eqx.combine(params, static))(tokens)

        model = from_function(read, ...)

    Args:
      function: causal, `(params, tokens) -> logits`; with `init_cache`
        `(params, tokens, positions, cache, mask) -> (logits, cache)`.  Either may return hidden
        states after the logits.  Define it once: a function object that is defined again is
        another model, and compiles again.
      vocab_size: V.
      max_positions: the longest text that the model can read, in tokens.
      init_cache: `(rows, slots) -> cache` makes an empty cache: a `KVCache`, a `RecurrentCache`, or
        any other `contract.Cache`.
      reads_trees: False for a function that ignores `mask`.  If the cache cannot commit paths, the
        model does not read trees in any case.

    Raises:
      ValueError: a size below 1, a function that cannot be hashed, or an unsuitable cache.
    """
    if init_cache is None:
        return RereadingModel(function, vocab_size, max_positions)
    cache = jax.eval_shape(lambda: init_cache(3, 2))
    if not isinstance(cache, Cache):
        raise ValueError(
            f"init_cache returns a {type(cache).__name__}; return a specjax.KVCache, a "
            "specjax.RecurrentCache, or a class of your own that inherits from "
            "specjax.contract.Cache"
        )
    for leaf in jax.tree.leaves(cache):
        if leaf.shape[:1] != (3,):
            raise ValueError(
                f"init_cache(3, 2) holds an array {list(leaf.shape)}; axis 0 of every array "
                "must be the row, so 3"
            )
    return CachedModel(
        function, vocab_size, max_positions, init_cache, reads_trees and cache.commits_paths
    )


def from_linen(module: nn.Module, **settings: Unpack[_Settings]) -> Model[ArrayTree, Cache]:
    """Makes a model from a `flax.linen` module; its params are the result of `module.init`.

    Args:
      module: its `__call__` takes `(tokens)`, or with a cache `(tokens, positions, cache, mask)`.
        Equal modules make equal models.
      **settings: as in `from_function`.

    Example:
      >>> model = from_linen(module, vocab_size=256, max_positions=1024)
    """
    return from_function(_Linen(module), **settings)


def from_nnx(
    model: nnx.Module, **settings: Unpack[_Settings]
) -> tuple[Model[ArrayTree, Cache], ArrayTree]:
    """Makes a `Model` and its params from a `flax.nnx` model in inference mode (`model.eval()`).

    Args:
      model: its `__call__` takes `(tokens)`, or with a cache `(tokens, positions, cache, mask)`.
        Changes that a call makes to the model itself are discarded.
      **settings: as in `from_function`.

    Example:
      >>> model, params = from_nnx(module, vocab_size=256, max_positions=1024)
    """
    # Imported only here, because several releases of JAX have broken this import.
    from flax import nnx

    graph, params = nnx.split(model)
    return from_function(_Nnx(graph), **settings), params


@dataclasses.dataclass(frozen=True)
class _Linen:
    module: nn.Module

    def __call__(self, params: Any, *inputs: Array | Cache | None) -> Any:
        return self.module.apply(params, *inputs)


@dataclasses.dataclass(frozen=True)
class _Nnx:
    graph: nnx.GraphDef

    def __call__(self, params: Any, *inputs: Array | Cache | None) -> Any:
        from flax import nnx

        return nnx.merge(self.graph, params)(*inputs)
