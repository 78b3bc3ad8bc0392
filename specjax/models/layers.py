"""What the parts of a layer are made of: linear maps, norms, activations and tables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax import Array
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from specjax import kernels
from specjax._internal.platforms import by_platform, on_cpu, on_cuda, on_gpu, on_tpu
from specjax.models.config import TransformerConfig
from specjax.models.packed import PackedKernel
from specjax.models.products import dot_general

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": nn.silu,
    "relu": nn.relu,
    "relu2": lambda x: jnp.square(nn.relu(x)),  # So et al. 2021, arXiv 2109.08668
    "gelu": functools.partial(nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(nn.gelu, approximate=True),
}


def scaled(x: Array, factor: float) -> Array:
    """Returns x times a number, in the dtype of x; a factor of 1 adds no operation."""
    return x if factor == 1.0 else x * jnp.asarray(factor, x.dtype)


def named_param(
    module: nn.Module, name: str, init: Initializer, axes: tuple[str, ...], shape: tuple[int, ...]
) -> Array:
    """Makes a parameter of `module` whose axes have names, for `parallel.sharding`."""
    if module.has_variable("params", name):
        # Linen would trace the initialiser of each parameter in each pass, to compare the shapes.
        held = nn.meta.unbox(module.get_variable("params", name))
        if isinstance(held, Array) and held.shape == shape:
            return held
    boxed = nn.with_logical_partitioning(init, axes)
    return cast(Array, module.param(name, boxed, shape))  # Linen unboxes it


class Dense(nn.Module):
    """A linear map y = x W (+ b): `kernel` [in, out], or `transposed` `weight` [out, in].

    With `in_parts` it returns float32 arrays [P, ..., out], of which y is the sum; without a bias.
    """

    features: int
    axes: tuple[str, str]
    use_bias: bool = False
    scale: float = 0.02
    dot_general: Callable[..., Array] = dot_general
    transposed: bool = False
    in_parts: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        name, turn, summed = ("weight", -1, 1) if self.transposed else ("kernel", 1, 0)
        init = nn.initializers.normal(self.scale)
        shape = (x.shape[-1], self.features)[::turn]
        kernel = named_param(self, name, init, self.axes[::turn], shape)
        if self.in_parts:
            return _product_in_parts(x, kernel, summed)
        y = self.dot_general(x, kernel, (((x.ndim - 1,), (summed,)), ((), ())))
        if self.use_bias:
            zeros = nn.initializers.zeros_init()
            y = y + named_param(self, "bias", zeros, self.axes[1:], (self.features,))
        return y


def _product_in_parts(x: Array, kernel: Array | PackedKernel, summed: int) -> Array:
    """Returns products [P, ..., out] with the P parts of a matrix, cut along its axis `summed`."""
    if isinstance(kernel, PackedKernel):
        return kernel.product_in_parts(x)
    parts = kernels.parts_of_products(kernel.shape[summed])
    rows = x.reshape(-1, parts, x.shape[-1] // parts)
    shape = [*kernel.shape]
    shape[summed : summed + 1] = parts, shape[summed] // parts
    dimensions = ((2,), (summed + 1,)), ((1,), (summed,))
    made = jax.lax.dot_general(
        rows, kernel.reshape(shape), dimensions, preferred_element_type=jnp.float32
    )
    return made.reshape(parts, *x.shape[:-1], -1)


@struct.dataclass
class Pending:
    """A residual stream [B, N, E] to which the sum of `parts` [P, B, N, E] is still to be added."""

    stream: Array
    parts: Array  # float32
    before: Array | None = None  # the stream before the layer that made the parts

    def sum(self) -> Array:
        return self.stream + self.parts.sum(0).astype(self.stream.dtype)


def apart(y: Array) -> Array:
    """Keeps a product apart from the operations that read it on a TPU.

    A TPU would turn the whole matrix in every step, so that its product lies as they read it.
    """
    return on_tpu(jax.lax.optimization_barrier, lambda y: y, y)


def aside(x: Array) -> Array:
    """Keeps the products of x apart from the other products of the same input on a GPU.

    XLA:GPU joins the products of one input, and where the columns of one of them are few (a gate
    for each head), it copies the matrices of all into one in every step.
    """
    return on_gpu(jax.lax.optimization_barrier, lambda x: x, x)


_FEW = 16
"""The most rows of a table that are looked up one by one on a CPU."""


@jax.custom_jvp
def look_up(table: Array, ids: Array) -> Array:
    """Returns the rows `ids` [...] of a table [V, E], as [..., E].

    For a gather from a bfloat16 table XLA:CPU first converts the whole table to float32.  It does
    not convert integers, so there the table is viewed as uint16.  It also divides a gather of a few
    rows among its threads, as if it read the whole table, and they wait for each other longer than
    it takes.  A gather of one row becomes a slice, which stays on one thread.
    """
    take = functools.partial(jnp.take, axis=0, mode="clip")
    few = 1 < ids.size <= _FEW

    def rows(table: Array, ids: Array) -> Array:
        if not few:
            return take(table, ids)
        found = [take(table, one) for one in jnp.split(ids.ravel(), ids.size)]
        return jnp.concatenate(found).reshape(*ids.shape, table.shape[1])

    def cpu(table: Array, ids: Array) -> Array:
        if table.dtype != jnp.bfloat16:
            return rows(table, ids)
        # Otherwise XLA views the table before a loop of steps begins, and there it copies it.
        table, ids = jax.lax.optimization_barrier((table, ids))
        words = jax.lax.bitcast_convert_type(table, jnp.uint16)
        return jax.lax.bitcast_convert_type(rows(words, ids), table.dtype)

    def gpu(table: Array, ids: Array) -> Array:
        # Of a single id XLA makes a slice, for which it gathers a table that is split over devices.
        two = take(table, jnp.pad(ids.reshape(1), (0, 1)))
        return jax.lax.optimization_barrier(two)[:1].reshape(*ids.shape, -1)

    if ids.size == 1:
        return by_platform({"cpu": cpu, "cuda": gpu, "rocm": gpu}, take, table, ids)
    by_slices = few or table.dtype == jnp.bfloat16
    return on_cpu(cpu, take, table, ids) if by_slices else take(table, ids)


@look_up.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    table, ids = primals
    slope, _ = tangents  # ids are integers and have no derivative
    return look_up(table, ids), jnp.take(slope, ids, axis=0, mode="clip")


def on_target(logits: Array, vocab_size: int, to_draft: Array | None = None) -> Array:
    """Maps [..., U] to [..., V], -inf for tokens that the draft never proposes.

    Args:
      logits: on the draft's vocabulary.
      vocab_size: V of the target.
      to_draft: [V] the draft's token for each of the target's, or a negative number where there is
        none; None: equal ids mean equal tokens, and the padded sizes may differ.
    """
    if to_draft is not None:
        # Each row is gathered by itself.  If one gather takes all rows, XLA:TPU stores the logits
        # as [V, rows] and pads the rows to 128.
        index = jnp.broadcast_to(to_draft, (*logits.shape[:-1], len(to_draft)))
        taken = jnp.take_along_axis(logits, index, axis=-1, mode="clip")
        return jnp.where(to_draft >= 0, taken, -jnp.inf)
    missing = vocab_size - logits.shape[-1]
    if missing > 0:
        pad = [(0, 0)] * (logits.ndim - 1) + [(0, missing)]
        logits = jnp.pad(logits, pad, constant_values=-jnp.inf)
    return logits[..., :vocab_size]


class Norm(nn.Module):
    """An RMS norm x / rms(x) * w, or a layer norm; computed in float32.

    Reference: Zhang and Sennrich 2019, arXiv 1910.07467, equation 4.

    Attributes:
      config: of the model.
      kind: a norm of `TransformerConfig`, by default `config.norm`.
      axis: the name of the last axis, over which the norm is taken; or the names of the last axes,
        if the weights differ along more than one.
      eps: is added to the mean square, by default `config.norm_eps`.
    """

    config: TransformerConfig
    kind: str | None = None
    axis: str | tuple[str, ...] = "embed"
    eps: float | None = None

    @nn.compact
    def __call__(self, x: Array | Pending) -> Any:
        """Returns the norm; of a `Pending` of few rows a pair: the sum, and its norm."""
        c, kind = self.config, self.kind or self.config.norm
        axes = (self.axis,) if isinstance(self.axis, str) else self.axis
        stream = x.stream if isinstance(x, Pending) else x
        shape = stream.shape[-len(axes) :]
        eps = c.norm_eps if self.eps is None else self.eps
        init = nn.initializers.constant(1.0 - c.norm_offset)
        weight = named_param(self, "weight", init, axes, shape)
        if isinstance(x, Pending):
            return _summed_norm(x, weight, eps, c.norm_offset)
        y = x.astype(jnp.float32)
        if kind != "rms":
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = unit_rms(y, eps)
        if kind == "layer":
            bias = named_param(self, "bias", nn.initializers.zeros_init(), axes, shape)
            return (y * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
        if kind == "centred":
            return (y * weight.astype(jnp.float32)).astype(x.dtype)
        return _weighted(y, weight, c.norm_offset, x.dtype)


def _weighted(y: Array, weight: Array, offset: float, dtype: DTypeLike) -> Array:
    if offset:  # Gemma rounds after the product, Llama before it
        return (y * (offset + weight.astype(jnp.float32))).astype(dtype)
    return weight * y.astype(dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _summed_norm(x: Pending, weight: Array, eps: float, offset: float) -> tuple[Array, Array]:
    """Returns the sum, and its RMS norm; by one kernel on an NVIDIA GPU."""

    def together(x: Pending, weight: Array) -> tuple[Array, Array]:
        return kernels.summed_norm_on_gpu(x.stream, x.parts, weight, eps, offset)

    apart = functools.partial(_sum_then_norm, eps=eps, offset=offset)
    return on_cuda(together, apart, x, weight)


def _sum_then_norm(x: Pending, weight: Array, eps: float, offset: float) -> tuple[Array, Array]:
    stream = x.sum()
    return stream, _weighted(unit_rms(stream, eps), weight, offset, stream.dtype)


@_summed_norm.defjvp
def _(eps: float, offset: float, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    return jax.jvp(functools.partial(_sum_then_norm, eps=eps, offset=offset), primals, tangents)


def unit_rms(x: Array, eps: float) -> Array:
    """Divides the last axis by its root mean square, in float32."""
    y = x.astype(jnp.float32)
    return y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)


def residual_scale(c: TransformerConfig) -> float:
    """Returns the init scale of output projections (GPT-2), which bounds the residual stream."""
    return c.init_scale / (2 * c.num_layers) ** 0.5
