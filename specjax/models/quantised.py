"""Weights in int8 with a scale per output channel, multiplied by activations in int8 too.

    y[m, o]  =  sx[m] * sw[o] * sum_i xq[m, i] * wq[o, i]
    xq = round(x / sx),  sx[m] = max_i |x[m, i]| / 127

The sum is exact in int32, so a row of y depends bit for bit only on its own row of x.  Kernels are
stored as [out, in], which XLA:CPU multiplies faster than [in, out].  On a CPU few rows are rounded
and multiplied by one kernel.  Without it a single row is padded to two, because XLA takes ten times
as long for one.  (qwix, which quantises Flax models too, does not pad it, and imports `flax.nnx`.)

Quantising the draft changes how many drafts are accepted, never the text.  A quantised target is a
different model from the original, and its texts differ.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax import Array
from jax.lax import DotDimensionNumbers

from specjax import kernels
from specjax._internal.platforms import on_cpu
from specjax.models.attention import attend
from specjax.models.base import LinenModel
from specjax.models.language_model import LanguageModel
from specjax.models.packed import Packed
from specjax.models.products import cpu_dot_general, dot_general, gpu_dot_general
from specjax.models.transformer import Transformer
from specjax.types import Weights

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


_INT8: dict[Callable[..., Array], Callable[..., Array]] = {
    dot_general: int8_dot_general,
    cpu_dot_general: cpu_int8_dot_general,
    gpu_dot_general: gpu_int8_dot_general,
}
"""Maps the product of a model to that of the model in int8."""


_XLA: dict[Callable[..., Array], Callable[..., Array]] = {
    cpu_dot_general: dot_general,
    gpu_dot_general: dot_general,
    cpu_int8_dot_general: int8_dot_general,
    gpu_int8_dot_general: int8_dot_general,
}


def int8_form(product: Callable[..., Array]) -> Callable[..., Array]:
    """Returns the form of a model's product that takes an `Int8` kernel too."""
    return product if product in _INT8.values() else _INT8.get(product, int8_dot_general)


_made: weakref.WeakKeyDictionary[LanguageModel, LanguageModel] = weakref.WeakKeyDictionary()
_rounding: weakref.WeakKeyDictionary[LanguageModel, LanguageModel] = weakref.WeakKeyDictionary()


def quantise(model: LanguageModel) -> LanguageModel:
    """Returns `model` with its matrices in int8, a quarter of their bytes in float32.

    The embedding stays as it is; a tied one gets an int8 copy as the output matrix.  Quantising the
    same model again returns the same object.

    Raises:
      ValueError: the model is not a specjax Transformer.

    Example:
      >>> draft = specjax.load(specjax.shipped("tiny/draft"))
      >>> specjax.quantise(draft) is specjax.quantise(draft)
      True
    """
    form = quantised_form(model)
    if form is model:
        return model
    if model not in _made:
        tied = "head" not in model.params
        params = (
            {**model.params, "head": {"kernel": model.params["embedding"].T}}
            if tied
            else model.params
        )
        _made[model] = dataclasses.replace(form, params=rounded_weights(params))
    return _made[model]


def quantised_form(model: LanguageModel) -> LanguageModel:
    """Returns the int8 model without converting the weights, which is enough for checks.

    Raises:
      ValueError: as `quantise`.
    """
    network = model.model
    if not (isinstance(network, LinenModel) and isinstance(network.module, Transformer)):
        raise ValueError(
            f"{model.name} is a {type(network).__name__}; only a specjax Transformer, as "
            "specjax.load returns, can be quantised here: a model of your own must quantise its "
            "weights itself"
        )
    if network.module.dot_general in _INT8.values():
        return model
    separate = "head" not in model.params or network.module.separate_head
    module = network.module.clone(
        dot_general=int8_form(network.module.dot_general),
        separate_head=separate,
        transposed=False,
    )
    made = dataclasses.replace(network, module=module)
    return dataclasses.replace(model, model=made, name=f"{model.name} in int8")


def rounded_weights(params: Mapping[str, Any]) -> Weights:
    """Returns parameters whose kernels are `Int8`."""
    quantised = {}
    for name, leaf in params.items():
        if isinstance(leaf, dict):
            quantised[name] = rounded_weights(leaf)
        # A kernel [in, out], or a transposed one, which has the name "weight".  So has the weight
        # of a norm, but it is 1-D.
        elif name in ("kernel", "weight") and leaf.ndim == 2:
            # A packed matrix is widened, and rounded again.
            wide = leaf.dense(jnp.float32) if isinstance(leaf, Packed) else leaf
            quantised["kernel"] = jax.jit(Int8.quantise)(wide if name == "kernel" else wide.T)
        else:
            quantised[name] = leaf
    return quantised


def round_activations(model: LanguageModel) -> LanguageModel:
    """Returns `model` with activations in 8 bits where matrices are packed.

    Its output matrix is in int8, as `quantise` makes it.  The same model gives the same object
    again.

    Raises:
      ValueError: as `quantise`.
    """
    if model not in _rounding:
        tied = "head" not in model.params
        head = {"kernel": model.params["embedding"].T} if tied else model.params["head"]
        params = {**_rounded(model.params), "head": rounded_weights(head)}
        _rounding[model] = dataclasses.replace(rounding_form(model), params=params)
    return _rounding[model]


def rounding_form(model: LanguageModel) -> LanguageModel:
    """Returns the model of `round_activations` with the weights as they are.

    Raises:
      ValueError: as `quantise`.
    """
    name = f"{model.name} with int8 activations"
    return dataclasses.replace(quantised_form(model), name=name)


def _rounded(params: Mapping[str, Any]) -> Weights:
    """Returns the parameters with packed matrices that round, and no transposed ones."""
    made = {}
    for name, leaf in params.items():
        if isinstance(leaf, dict):
            made[name] = _rounded(leaf)
            continue
        matrix = name == "weight" and leaf.ndim == 2
        if isinstance(leaf, Packed):
            turned = leaf.turned or matrix
            made["kernel" if matrix else name] = dataclasses.replace(
                leaf, rounds=True, turned=turned
            )
        elif matrix:
            made["kernel"] = leaf.T
        else:
            made[name] = leaf
    return made


def for_several_devices(model: LanguageModel) -> LanguageModel:
    """Returns `model` without `specjax.kernels`, for which XLA would gather split arrays."""
    network = model.model
    if not (isinstance(network, LinenModel) and isinstance(network.module, Transformer)):
        return model
    module = network.module
    product = _XLA.get(module.dot_general, module.dot_general)
    if product is module.dot_general and module.attend is attend:
        return model
    module = module.clone(dot_general=product, attend=attend)
    return dataclasses.replace(model, model=dataclasses.replace(network, module=module))
