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

from specjax._internal.platforms import on_cpu
from specjax.models import float32_dot_general

Dimensions = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""The `dimension_numbers` of `jax.lax.dot_general`."""


def mixed_dot_general(x: Array, kernel: Array, dimensions: Dimensions) -> Array:
    """`jax.lax.dot_general` of activations [..., in] and a kernel, both rounded to bfloat16.

    The backward products are rounded too, except on CPU, where they are float32: XLA:CPU has a fast
    bfloat16 path for the forward product only.
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

    def products(dtype: DTypeLike, x: Array, kernel: Array, grad: Array) -> tuple[Array, Array]:
        product = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
        flat_grad = grad.reshape(-1, grad.shape[-1]).astype(dtype)
        flat_x = x.reshape(-1, x.shape[-1]).astype(dtype)
        grad_x = product(flat_grad, kernel.astype(dtype), (((1,), (1 - kernel_axis,)), ((), ())))
        pair = (flat_x, flat_grad) if kernel_axis == 0 else (flat_grad, flat_x)
        return grad_x.reshape(x.shape), product(*pair, (((0,), (0,)), ((), ())))

    by_dtype = (functools.partial(products, dtype) for dtype in (jnp.float32, jnp.bfloat16))
    return on_cpu(*by_dtype, x, kernel, grad)


_mixed.defvjp(_forward, _backward)
