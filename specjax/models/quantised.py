"""Weights in int8: a kernel as whole numbers with a scale per output channel, multiplied by activations in int8 too.

    y[m, o]  =  sx[m] * sw[o] * sum_i xq[m, i] * wq[o, i]       xq = round(x / sx),  sx[m] = max_i |x[m, i]| / 127

The sum is exact in int32, so that a row of y depends on its row of x alone, to the bit.  Kernels stand as [out, in],
which XLA:CPU multiplies faster than [in, out]; a single row is padded to two, since alone it takes ten times as long.
(qwix, which quantises Flax models too, does not pad it, and imports `flax.nnx`.)

A quantised draft changes how often it is right, never the text.  A quantised target is another model than the one it
was made from, and its text is its own.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax import Array

from specjax.models.base import LinenModel
from specjax.models.language_model import LanguageModel
from specjax.models.products import dot_general

_LARGEST = 127


@struct.dataclass
class Int8(nn.meta.AxisMetadata):
    """A kernel [in, out] that stands as [out, in]; Linen unboxes it where the module asks for the parameter."""

    values: Array  # [out, in] int8
    scale: Array  # [out] float32

    @classmethod
    def quantise(cls, kernel: Array) -> Int8:
        """Round [in, out] to the nearest multiple of each column's greatest value / 127."""
        values, scale = _round(kernel.T)
        return cls(values, scale[:, 0])

    def unbox(self) -> _Kernel:
        return _Kernel(self)

    def replace_boxed(self, val: Any) -> Any:
        return val

    def add_axis(self, index: int, params: Any) -> Any:
        raise ValueError("an int8 kernel cannot be stacked; stack the model, then quantise it")

    remove_axis = add_axis


class _Kernel:
    """What the module gets to see: an opaque leaf of the right shape, which it can only hand to its dot_general."""

    def __init__(self, stored: Int8):
        self.stored = stored
        self.shape = stored.values.shape[::-1]


def _round(x: Array) -> tuple[Array, Array]:
    """[M, K] -> int8 [M, K] and float32 [M, 1], a scale a row."""
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(-1, keepdims=True) / _LARGEST
    scale = jnp.where(scale == 0, 1, scale)
    return jnp.round(x / scale).astype(jnp.int8), scale


def int8_dot_general(x: Array, kernel: Any, dimensions: Any) -> Array:
    """`models.products.dot_general`, with an `Int8` kernel too."""
    if not isinstance(kernel, _Kernel):
        return dot_general(x, kernel, dimensions)
    if dimensions != (((x.ndim - 1,), (0,)), ((), ())):
        raise ValueError(f"an int8 kernel contracts x's last axis with its first, not {dimensions}")
    rows, scale = _round(x.reshape(-1, x.shape[-1]))
    count = len(rows)
    if count == 1:
        rows = jnp.pad(rows, ((0, 1), (0, 0)))
    product = jax.lax.dot_general(
        rows, kernel.stored.values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
    )
    y = product[:count].astype(jnp.float32) * scale * kernel.stored.scale
    return y.reshape(*x.shape[:-1], -1).astype(x.dtype)


_made: weakref.WeakKeyDictionary[LanguageModel, LanguageModel] = weakref.WeakKeyDictionary()


def quantise(model: LanguageModel) -> LanguageModel:
    """`model` with its matrices in int8, a quarter of their bytes; the embedding that tokens are looked up in stays.

    A tied embedding gets an int8 copy as the output matrix.  The same object is returned for the same model.

    Raises:
      ValueError: a model that multiplies its weights by itself, so not one of ours.
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
        _made[model] = dataclasses.replace(form, params=_quantise(params))
    return _made[model]


def quantised_form(model: LanguageModel) -> LanguageModel:
    """What `quantise` makes, but with the weights as they are: enough to check what it is used for.

    Nothing is compiled.

    Raises:
      ValueError: as `quantise`.
    """
    network = model.model
    if not (isinstance(network, LinenModel) and hasattr(network.module, "dot_general")):
        raise ValueError(
            f"{model.name} is a {type(network).__name__}; only a specjax Transformer, as specjax.load returns, can be "
            "quantised here: a model of your own brings its weights in int8 itself"
        )
    if network.module.dot_general is int8_dot_general:
        return model
    separate = "head" not in model.params or network.module.separate_head
    module = network.module.clone(
        dot_general=int8_dot_general, separate_head=separate, transposed=False
    )
    made = dataclasses.replace(network, module=module)
    return dataclasses.replace(model, model=made, name=f"{model.name} in int8")


def _quantise(params: Any) -> Any:
    found = {}
    for name, leaf in params.items():
        if isinstance(leaf, dict):
            found[name] = _quantise(leaf)
        elif (
            name in ("kernel", "weight") and leaf.ndim == 2
        ):  # [in, out], or transposed; a norm's weight is a vector
            found["kernel"] = jax.jit(Int8.quantise)(leaf if name == "kernel" else leaf.T)
        else:
            found[name] = leaf
    return found
