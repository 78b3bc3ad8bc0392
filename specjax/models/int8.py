"""Weights in int8 with a scale per output channel, multiplied by activations in int8 too.

    y[m, o]  =  sx[m] * sw[o] * sum_i xq[m, i] * wq[o, i]
    xq = round(x / sx),  sx[m] = max_i |x[m, i]| / 127

The sum is exact in int32, so a row of y depends bit for bit only on its own row of x.  Kernels are
stored as [out, in], which XLA:CPU multiplies faster than [in, out].  On a CPU few rows are rounded
and multiplied by one kernel.  Without it a single row is padded to two, because XLA takes ten times
as long for one.  (qwix, which quantises Flax models too, does not pad it, and imports `flax.nnx`.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax import Array
from jax.lax import DotDimensionNumbers

from specjax import kernels
from specjax._internal.platforms import on_cpu
from specjax.models.products import cpu_dot_general, dot_general, gpu_dot_general

_LARGEST = 127


@struct.dataclass
class Int8(nn.meta.AxisMetadata):
    """A kernel [in, out], stored as [out, in].

    Linen unboxes it when the module asks for the parameter.
    """

    values: Array  # [out, in] int8
    scale: Array  # [out] float32

    @classmethod
    def quantise(cls, kernel: Array) -> Int8:
        """Rounds [in, out] to multiples of each column's largest absolute value / 127."""
        values, scale = _round(kernel.T)
        return cls(values, scale[:, 0])

    def unbox(self) -> _Kernel:
        return _Kernel(self)

    def replace_boxed(self, val: Any) -> Any:
        return val

    def add_axis(self, index: int, params: dict) -> NoReturn:
        raise ValueError("an int8 kernel cannot be stacked; stack the model, then quantise it")

    remove_axis = add_axis


class _Kernel:
    """An unboxed `Int8` inside a module: it has a shape, and the module's dot_general takes it."""

    def __init__(self, stored: Int8) -> None:
        self.stored = stored
        self.shape = stored.values.shape[::-1]


def _round(x: Array) -> tuple[Array, Array]:
    """Rounds [..., K] to int8 [..., K] and float32 [..., 1], one scale per row."""
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(-1, keepdims=True) * jnp.float32(1 / _LARGEST)
    scale = jnp.where(scale == 0, 1, scale)
    return jnp.round(x / scale).astype(jnp.int8), scale


def int8_dot_general(x: Array, kernel: Array | _Kernel, dimensions: DotDimensionNumbers) -> Array:
    """Computes `models.products.dot_general`, and takes an `Int8` kernel too."""
    return _dot_general(x, kernel, dimensions, dot_general, False)


def cpu_int8_dot_general(
    x: Array, kernel: Array | _Kernel, dimensions: DotDimensionNumbers
) -> Array:
    """Computes `models.products.cpu_dot_general`, and takes an `Int8` kernel too."""
    return _dot_general(x, kernel, dimensions, cpu_dot_general, True)


def gpu_int8_dot_general(
    x: Array, kernel: Array | _Kernel, dimensions: DotDimensionNumbers
) -> Array:
    """Computes `models.products.gpu_dot_general`, and takes an `Int8` kernel too."""
    return _dot_general(x, kernel, dimensions, gpu_dot_general, False)


def _dot_general(
    x: Array,
    kernel: Array | _Kernel,
    dimensions: DotDimensionNumbers,
    other: Callable[..., Array],
    few: bool,
) -> Array:
    """Returns `other`, or the product with an `Int8`.

    With `few` the kernels of `specjax.kernels` multiply few rows.
    """
    if not isinstance(kernel, _Kernel):
        return other(x, kernel, dimensions)
    if dimensions != (((x.ndim - 1,), (0,)), ((), ())):
        raise ValueError(f"an int8 kernel contracts x's last axis with its first, not {dimensions}")
    stored = kernel.stored

    def product(x: Array, values: Array) -> Array:
        # With its axes kept.  A TPU would write the logits of flat rows again to part the axes.
        summed = ((x.ndim - 1,), (1,)), ((), ())
        return jax.lax.dot_general(x, values, summed, preferred_element_type=jnp.int32)

    def flat(x: Array, values: Array) -> Array:
        if few and kernels.takes(x.size // x.shape[-1], values, 1):
            return kernels.few_rows(x, values, 1)
        rows = x.reshape(-1, x.shape[-1])
        padding = ((0, 1 if len(rows) == 1 else 0), (0, 0))
        return product(jnp.pad(rows, padding), values)[: len(rows)].reshape(*x.shape[:-1], -1)

    def scaled(x: Array, stored: Int8, product: Callable[..., Array]) -> Array:
        rounded, scale = _round(x)
        return product(rounded, stored.values).astype(jnp.float32) * scale * stored.scale

    @jax.custom_jvp
    def by_kernel(x: Array, stored: Int8) -> Array:
        return kernels.few_rounded_rows(x, stored.values, stored.scale)

    @by_kernel.defjvp
    def _(primals: tuple[Array, Int8], tangents: tuple[Array, Int8]) -> tuple[Array, Array]:
        return jax.jvp(functools.partial(scaled, product=flat), primals, tangents)

    def cpu(x: Array, stored: Int8) -> Array:
        if few and kernels.takes_rounded(x.size // x.shape[-1], stored.values):
            return by_kernel(x, stored)
        return scaled(x, stored, flat)

    def accelerator(x: Array, stored: Int8) -> Array:
        return scaled(x, stored, product)

    return on_cpu(cpu, accelerator, x, stored).astype(x.dtype)


INT8_FORMS: dict[Callable[..., Array], Callable[..., Array]] = {
    dot_general: int8_dot_general,
    cpu_dot_general: cpu_int8_dot_general,
    gpu_dot_general: gpu_int8_dot_general,
}
"""Maps the product of a model to that of the model in int8."""


def int8_form(product: Callable[..., Array]) -> Callable[..., Array]:
    """Returns the form of a model's product that takes an `Int8` kernel too."""
    return product if product in INT8_FORMS.values() else INT8_FORMS.get(product, int8_dot_general)
