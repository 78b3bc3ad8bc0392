"""Bring your own model: a plain function, a Linen module, an NNX model, and Equinox through the plain function.

Without `init_cache` a model is a function of the text, `tokens [B, T] -> logits [B, T, V]`; it is read again in every
pass, which is exact and slow.  With `init_cache` it keeps a cache.  `specjax.models.function` has both contracts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from specjax.contract import Cache, Model
from specjax.models.function import CachedModel, RereadingModel


def from_function(
    function: Callable[..., Any],
    *,
    vocab_size: int,
    max_positions: int,
    init_cache: Callable[[int, int], Any] | None = None,
    reads_trees: bool = True,
) -> Model:
    """A pure function as a model.

    An Equinox model comes in through its two halves:

        params, static = eqx.partition(net, eqx.is_array)
        model = from_function(lambda params, tokens: jax.vmap(eqx.combine(params, static))(tokens), ...)

    Args:
      function: `(params, tokens) -> logits`, causal; with `init_cache` `(params, tokens, positions, cache, mask) ->
        (logits, cache)`.  Either may return hidden features after the logits.  Define it once: a second, equal
        function is another model, and compiles again.
      vocab_size: V.
      max_positions: the longest text that the model can read, in tokens.
      init_cache: `(rows, slots) -> cache`, empty: a `KVCache`, a `RecurrentCache`, or any `types.ChainCache`.
      reads_trees: False for a function that ignores `mask`.  A cache that commits no paths says so itself.

    Raises:
      ValueError: sizes that are none, a function that cannot be hashed, a cache of the wrong make.
    """
    if init_cache is None:
        return RereadingModel(function, vocab_size, max_positions)
    cache = jax.eval_shape(lambda: init_cache(3, 2))
    if not isinstance(cache, Cache):
        raise ValueError(
            f"init_cache returns a {type(cache).__name__}; return a specjax.KVCache, a specjax.RecurrentCache, or a "
            "class of your own that inherits from specjax.contract.Cache"
        )
    for leaf in jax.tree.leaves(cache):
        if leaf.shape[:1] != (3,):
            raise ValueError(
                f"init_cache(3, 2) holds an array {list(leaf.shape)}; axis 0 of every array must be the row, so 3"
            )
    return CachedModel(
        function, vocab_size, max_positions, init_cache, reads_trees and cache.commits_paths
    )


def from_linen(module: Any, **settings: Any) -> Model:
    """A `flax.linen` module as a model; its params are what `module.init` returns.

    Args:
      module: its `__call__` takes `(tokens)`, or with a cache `(tokens, positions, cache, mask)`.  Equal modules make
        equal models.
      **settings: of `from_function`.
    """
    return from_function(_Linen(module), **settings)


def from_nnx(model: Any, **settings: Any) -> tuple[Model, Any]:
    """A `flax.nnx` model, in its inference mode (`model.eval()`), as a model and its params.

    Args:
      model: its `__call__` takes `(tokens)`, or with a cache `(tokens, positions, cache, mask)`.  What it changes in
        itself meanwhile is forgotten.
      **settings: of `from_function`.
    """
    from flax import nnx  # here alone: its import has broken with several releases of JAX

    graph, params = nnx.split(model)
    return from_function(_Nnx(graph), **settings), params


@dataclasses.dataclass(frozen=True)
class _Linen:
    module: Any

    def __call__(self, params: Any, *inputs: Any) -> Any:
        return self.module.apply(params, *inputs)


@dataclasses.dataclass(frozen=True)
class _Nnx:
    graph: Any

    def __call__(self, params: Any, *inputs: Any) -> Any:
        from flax import nnx

        return nnx.merge(self.graph, params)(*inputs)
