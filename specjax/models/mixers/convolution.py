"""A short causal convolution of each channel, along the branches of a tree."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from specjax.models.layers import named_param


def convolve_each(
    layer: nn.Module,
    inputs: Mapping[str, Array],
    columns: tuple[Array, ...],
    size: int,
    init_scale: float,
    ancestors: Array | None,
    bias: bool = False,
) -> dict[str, Array]:
    """Returns silu(convolution) of each input, with kernels that are parameters of `layer`.

    Args:
      layer: a compact module, in its `__call__`.
      inputs: [B, N, C] each, by the names in those of the parameters.
      columns: of each input, as for `convolve`.
      size: K, the tokens that a convolution reads.
      init_scale: of the kernels.
      ancestors: as for `convolve`.
      bias: whether a bias is added to a convolution.
    """
    out = {}
    for (name, new), before in zip(inputs.items(), columns, strict=True):
        init, channels = nn.initializers.normal(init_scale), new.shape[-1]
        kernel = named_param(layer, f"conv_{name}", init, ("conv", "states"), (size, channels))
        y = convolve(new, before, kernel, ancestors)
        if bias:
            zeros = nn.initializers.zeros_init()
            y = y + named_param(layer, f"conv_{name}_bias", zeros, ("states",), (channels,))
        out[name] = nn.silu(y)
    return out


def convolve(x: Array, columns: Array, kernel: Array, ancestors: Array | None = None) -> Array:
    """Returns [B, N, C]: for each node the sum over itself and its K - 1 nearest ancestors.

    Args:
      x: [B, N, C].
      columns: [B, K - 1, C], the inputs before the first node, the oldest first.
      kernel: [K, C], of the oldest token first.
      ancestors: [B or 1, N, N] bool, of each node, itself included; None: each node is the child of
        the node before it.
    """
    size, width = len(kernel), x.shape[1]
    every = jnp.concatenate([columns.astype(x.dtype), x], axis=1)
    kernel = kernel.astype(x.dtype)
    depth = None if ancestors is None else ancestors.sum(-1) - 1  # [B or 1, N]
    out = kernel[-1] * x
    for back in range(1, size):
        if ancestors is None or depth is None:
            before = every[:, size - 1 - back :][:, :width]
        else:
            there = depth[:, :, None] - back  # the depth of the ancestor, below 0 before the root
            found = ancestors & (depth[:, None] == there)
            at = size - 1 + jnp.where(there[..., 0] < 0, there[..., 0], jnp.argmax(found, axis=2))
            at = jnp.broadcast_to(at, x.shape[:2])
            before = jnp.take_along_axis(every, at[..., None], axis=1)
        out = out + kernel[-1 - back] * before
    return out
