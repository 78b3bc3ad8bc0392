"""Runs one layer of a transformer, and observes the inputs of its linear maps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from specjax.models.layers import Dense
from specjax.models.transformer import Layer, Transformer
from specjax.types import Weights

Path = tuple[str, ...]


class Ran(NamedTuple):
    """What a layer returned, and the products of its inputs."""

    stream: Array  # [B, N, E], after the layer
    written: Any  # its keys and values, which later layers may share
    products: dict[Path, Array]  # X^T X [in, in] of the inputs X [B * N, in] of each linear map


def run_layer(
    module: Transformer,
    params: Weights,
    tokens: Array,
    index: int,
    stream: Array | None = None,
    written: Mapping[int, Any] | None = None,
) -> Ran:
    """Runs a layer on texts without a cache.

    The other layers are skipped, so under `jax.jit` this is the program of one layer.

    Args:
      module: the transformer.
      params: of it.
      tokens: [B, N], texts of one length from their first token.
      index: of the layer.
      stream: [B, N, E], the residual stream before the layer; None: the embedding.
      written: what earlier layers wrote, by their indices.
    """
    ran: list[tuple[Array, Any]] = []
    products: dict[Path, Array] = {}

    def intercept(
        run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: Any
    ) -> Any:
        layer = context.module
        if context.method_name != "__call__":
            return run(*args, **kwargs)
        if isinstance(layer, Layer):
            if layer.index != index:
                return args[0], (written or {}).get(layer.index)
            x = args[0] if stream is None else stream
            ran.append(run(x, *args[1:], **kwargs))
            return ran[0]
        if isinstance(layer, Dense) and f"layer_{index}" in layer.path:
            rows = args[0].reshape(-1, args[0].shape[-1]).astype(jnp.float32)
            products[layer.path] = rows.T @ rows
        return run(*args, **kwargs)

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    with nn.intercept_methods(intercept):
        # Where intermediates are collected, every layer has a trace of its own.
        module.apply({"params": params}, tokens, positions, mutable=["intermediates"])
    return Ran(*ran[0], products)
