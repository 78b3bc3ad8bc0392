"""`Convolution`: causal convolutions over the slots of a block, around a branch of a layer.

    dynamic = projection(u)                                              one kernel a slot
    conv(x, side)[s, c] = sum_t (base[side, t, c] + dynamic[s, side, t, c / group]) x[s - t, c]

The input of the branch is conv(u, 0), and its output y becomes conv(y, 1), both with the dynamic
kernels of u.  Slots before the block count as 0.

Reference: z-lab's DFlash-2, package `dflash` 0.1.0.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from specjax.models import Dense, named_param


class Convolution(nn.Module):
    """The two convolutions of a branch, of its input and of its output.

    Attributes:
      size: slots that each slot reads, itself included.
      group: channels that share their dynamic kernel.
      dense: makes the projection.
    """

    size: int
    group: int
    dense: Callable[..., Dense]

    def _base(self, channels: int) -> Array:
        init = nn.initializers.normal(0.02)
        axes = ("sides", "taps", "embed")
        return named_param(self, "base", init, axes, (2, self.size, channels))

    @nn.compact
    def _kernels(self, u: Array) -> Array:
        """[B, S, H] -> [2, B, S, size, H]: of the input and of the output."""
        channels = u.shape[-1]
        groups = channels // self.group
        projection = self.dense(
            2 * self.size * groups, ("embed", "taps"), False, 0.02, name="projection"
        )
        dynamic = projection(u).reshape(*u.shape[:-1], 2, self.size, groups)
        dynamic = jnp.moveaxis(jnp.repeat(dynamic, self.group, axis=-1), -3, 0)
        return self._base(channels)[:, None, None].astype(u.dtype) + dynamic

    def __call__(self, u: Array) -> tuple[Array, Array]:
        """Returns the convolved input [B, S, H], and the kernel of the output for `finish`."""
        before, after = self._kernels(u)
        return self.finish(u, before), after

    def finish(self, x: Array, kernel: Array) -> Array:
        """Convolves `x` [B, S, H] with `kernel` [B, S, size, H]."""
        out = kernel[:, :, 0] * x
        for tap in range(1, self.size):
            shifted = jnp.pad(x, ((0, 0), (tap, 0), (0, 0)))[:, : x.shape[1]]
            out = out + kernel[:, :, tap] * shifted
        return out
