"""Matrix products in bfloat16 with float32 sums.

Parameters, activations and gradients stay float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from specjax.models import float32_dot_general
from specjax.platforms import on_cpu

Dimensions = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""The `dimension_numbers` of `jax.lax.dot_general`."""


def mixed_dot_general(x: Array, kernel: Array, dimensions: Dimensions) -> Array:
    """`jax.lax.dot_general` of activations [..., in] and a kernel, both rounded to bfloat16.

    The backward products are rounded too, except the kernel's gradient on a CPU: XLA:CPU has no
    fast product in bfloat16 that sums over the first axis of both its inputs.
    """
    return _mixed(x, kernel, dimensions)  # pyright: ignore[reportReturnType]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _mixed(x: Array, kernel: Array, dimensions: Dimensions) -> Array:
    return float32_dot_general(x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16), dimensions)


def _forward(x: Array, kernel: Array, dimensions: Dimensions) -> tuple[Array, tuple[Array, Array]]:
    return _mixed(x, kernel, dimensions), (x, kernel)


def _backward(
    dimensions: Dimensions, saved: tuple[Array, Array], grad: Array
) -> tuple[Array, Array]:
    x, kernel = saved
    ((_, (kernel_axis,)), _) = dimensions

    flat_x, flat_grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    grad_x = mixed_dot_general(flat_grad, kernel, (((1,), (1 - kernel_axis,)), ((), ())))
    pair = (flat_x, flat_grad) if kernel_axis == 0 else (flat_grad, flat_x)

    def product(dtype: DTypeLike, x: Array, y: Array) -> Array:
        rows_last = (((0,), (0,)), ((), ()))
        return jax.lax.dot_general(
            x.astype(dtype), y.astype(dtype), rows_last, preferred_element_type=jnp.float32
        )

    by_dtype = (functools.partial(product, dtype) for dtype in (jnp.float32, jnp.bfloat16))
    return grad_x.reshape(x.shape), on_cpu(*by_dtype, *pair)


_mixed.defvjp(_forward, _backward)
