"""Multiplies activations with weights, in a form that each platform multiplies fast.

XLA:CPU has fast kernels for bfloat16 only if the result is float32 and if there are at least two
rows: a bfloat16 product of one row, or with a bfloat16 result, takes 10 to 20 times as long.
Padding the row and rounding afterwards gives the same result: products are summed in float32 in any
case, and rounded once.  `cpu_dot_general` has kernels of its own for few rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import DotDimensionNumbers
from jax.typing import DTypeLike

from specjax import kernels
from specjax._internal.platforms import Device, by_platform, on_cpu, on_gpu, runs_triton
from specjax.models.packed import PackedKernel


def rounded(x: Array, dtype: DTypeLike) -> Array:
    """Converts to a dtype, and keeps the rounding.

    XLA may leave out a conversion that is taken back, and so compute one pass more precisely than
    another of the same tokens.
    """
    if x.dtype == dtype == jnp.float32:
        return x
    kept = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x.astype(jnp.float32), kept.nexp, kept.nmant).astype(dtype)


def dot_general(x: Array, kernel: Array | PackedKernel, dimensions: DotDimensionNumbers) -> Array:
    """Computes `jax.lax.dot_general` of activations [..., in] and a matrix, in the dtype of x.

    `dimensions` must contract the last axis of x.
    """
    if isinstance(kernel, PackedKernel):
        return kernel.product(x, dimensions)
    product = functools.partial(jax.lax.dot_general, dimension_numbers=dimensions)
    ((_, (summed,)), _) = dimensions
    flat, one_row = (((1,), (summed,)), ((), ())), x.size == x.shape[-1]

    def gpu(x: Array, kernel: Array) -> Array:
        # XLA:GPU would write the terms of one row to memory, rounded, before it adds them.
        two = jnp.broadcast_to(x.reshape(1, -1), (2, x.shape[-1]))
        return jax.lax.dot_general(two, kernel, flat)[:1].reshape(*x.shape[:-1], -1)

    if x.dtype == jnp.float32:  # also with a kernel in bfloat16, as a router has it
        wide = kernel.astype(jnp.float32)
        turned = one_row and kernel.dtype != jnp.float32
        return on_gpu(gpu, product, x, wide) if turned else product(x, wide)

    def cpu(x: Array, kernel: Array) -> Array:
        rows = x.reshape(-1, x.shape[-1])
        y = _cpu_product(rows, kernel, flat)
        return y.astype(x.dtype).reshape(*x.shape[:-1], -1)

    if not one_row:
        return on_cpu(cpu, product, x, kernel)
    return by_platform({"cpu": cpu, "cuda": gpu, "rocm": gpu}, product, x, kernel)


def cpu_dot_general(
    x: Array, kernel: Array | PackedKernel, dimensions: DotDimensionNumbers
) -> Array:
    """Computes `dot_general` for arrays on one device, with `specjax.kernels` for few rows.

    On several devices XLA would gather the kernel, so models on them take `dot_general`.
    """
    if isinstance(kernel, PackedKernel):
        return kernel.product(x, dimensions, alone=True)
    return _cpu_dot_general(x, kernel, dimensions)


def gpu_dot_general(
    x: Array, kernel: Array | PackedKernel, dimensions: DotDimensionNumbers
) -> Array:
    """Computes `dot_general` for arrays on one NVIDIA GPU for which Triton compiles.

    Few rows are multiplied with a packed matrix by a kernel.
    """
    if isinstance(kernel, PackedKernel):
        return kernel.product(x, dimensions, alone=True)
    return dot_general(x, kernel, dimensions)


def dot_general_on(device: Device | None) -> Callable[..., Array]:
    """Returns the form of `dot_general` for a model on one device; None: it is on several."""
    if device is not None and device.platform == "cpu":
        return cpu_dot_general
    return gpu_dot_general if device is not None and runs_triton(device) else dot_general


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _cpu_dot_general(x: Array, kernel: Array, dimensions: DotDimensionNumbers) -> Array:
    ((_, (summed,)), _) = dimensions
    product = functools.partial(dot_general, dimensions=dimensions)
    # A matrix [in, out] in bfloat16 is multiplied with float32 numbers alone.
    narrow = summed == 0 and kernel.dtype == jnp.bfloat16 == x.dtype
    if narrow or not kernels.takes(x.size // x.shape[-1], kernel, summed):
        return product(x, kernel)

    def few(x: Array, kernel: Array) -> Array:
        return rounded(kernels.few_rows(rounded(x, x.dtype), kernel, summed), x.dtype)

    return on_cpu(few, product, x, kernel)


@_cpu_dot_general.defjvp
def _(
    dimensions: DotDimensionNumbers, primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    (x, kernel), (dx, dkernel) = primals, tangents
    y = _cpu_dot_general(x, kernel, dimensions)
    return y, dot_general(dx, kernel, dimensions) + dot_general(x, dkernel, dimensions)


def stacked_product(
    x: Array, stack: Array | PackedKernel, number: Array, alone: bool = True
) -> Array:
    """Computes x [M, K] times the matrix `number` of a stack [E, K, N], in float32.

    The arrays are on one CPU; those of a packed stack may be on other devices, and on several if
    `alone` is false.  For few rows it reads that matrix once, with `specjax.kernels`.  For more
    rows, and without them, XLA copies it first.
    """
    if isinstance(stack, PackedKernel):
        return stack.product_with(x, number, alone)
    if alone and kernels.takes_stacked(stack) and len(x) <= kernels.most_rows(stack.dtype.name):
        return kernels.few_rows_of(x, stack, number)
    cut = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
    if stack.dtype != jnp.bfloat16:
        matrix = cut(stack, number)
    else:  # otherwise XLA:CPU converts the whole stack to float32 (see `layers.look_up`)
        whole, number = jax.lax.optimization_barrier((stack, number))
        words = cut(jax.lax.bitcast_convert_type(cast(Array, whole), jnp.uint16), number)
        matrix = jax.lax.bitcast_convert_type(words, jnp.bfloat16)
    return float32_dot_general(x, matrix, (((1,), (0,)), ((), ())))


def float32_dot_general(x: Array, y: Array, dimensions: DotDimensionNumbers) -> Array:
    """Computes `jax.lax.dot_general` with a float32 result [..., M, N].

    Args:
      x: [..., M, K].  All its axes but the last two are batch axes, if it has more.
      y: contracted with x's last axis.
      dimensions: as for `jax.lax.dot_general`.
    """
    product = functools.partial(
        jax.lax.dot_general, dimension_numbers=dimensions, preferred_element_type=jnp.float32
    )
    if x.dtype == y.dtype == jnp.float32:
        return product(x, y)
    return on_cpu(functools.partial(_cpu_product, dimensions=dimensions), product, x, y)


def _cpu_product(x: Array, y: Array, dimensions: DotDimensionNumbers) -> Array:
    """Computes `float32_dot_general` for XLA:CPU."""
    rows = x.shape[-2]
    if rows == 1:
        x = jnp.pad(x, (*[(0, 0)] * (x.ndim - 2), (0, 1), (0, 0)))
    if jax.__version_info__ < (0, 10):
        # XLA:CPU before jax 0.10 has no bfloat16 product with a float32 result.  Converting the
        # inputs to float32 changes no number.
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    product = jax.lax.dot_general(x, y, dimensions, preferred_element_type=jnp.float32)
    return product[..., :rows, :]
