"""Matrices that stay packed on the device: codes of 4 or 8 bits with a scale for each group.

    w[o, i] = (code[o, i] - zero[o, g]) * scale[o, g] - least[o, g],   g = i // group

A code is a whole number, a number of e4m3 (FP8), or one of e2m1 (FP4).  A product widens the codes
where it reads them.  On an accelerator XLA does so inside the fusion that multiplies, if the codes
lie in groups [groups, inputs of a group, out] and the product sums over two axes: of [out, in] XLA
for a TPU would write the wide matrix first.  XLA:CPU would write it in any case, so there the codes
are [out, in].  Few rows are multiplied by a kernel that widens codes in registers, if there is one
for their layout (`kernels.coding_of`).  Else the product takes a few outputs at a time, and their
wide rows stay in the cache.  XLA for a GPU would write the wide matrix too, and few rows are
multiplied by a kernel there (`kernels.few_rows_of_codes_on_gpu`).

The wide numbers are computed in float32 and rounded once to the dtype of the activations, so they
are those of a matrix that was dequantised when it was loaded.  Where a format divides the scales by
a number of the whole matrix, they are multiplied by its inverse here, and differ in the last bit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax import Array
from jax.lax import DotDimensionNumbers
from jax.typing import DTypeLike

from specjax import kernels
from specjax._internal.platforms import on_cpu, on_cuda
from specjax.types import Weights

_OUTPUTS = 64
"""The outputs that a CPU computes at once.

Of 64, 128, 256 and 512, 64 took the least time for 1 to 16 rows of a matrix [4096, 4096] in int8,
FP8 and FP4 (two Intel Xeon cores, 26 November 2026).
"""


@struct.dataclass
class Packed(nn.meta.AxisMetadata):
    """A packed matrix [out, in], or a stack [E, out, in] of them.

    Linen unboxes it when the module asks for the parameter.

    In groups, codes are [..., groups, inputs of a group, out], with codes of 0 after the last
    input, and what is [..., out, n] below is [..., n, out].

    Attributes:
      codes: [..., out, in] in int8, uint8, uint4 or float8_e4m3fn; or, if `pairs` is set,
        [..., out, in / 2] in uint8, with input 2i in the low half of byte i and 2i + 1 in the high.
      scales: [..., out, groups] in a float dtype, or in uint8: s stands for 2^(s - 127).
      zeros: [..., out, groups] of whole numbers, or None.
      whole: [..., out, 1], a second factor of the scales, or its inverse, or None.
      least: [..., out, groups] float32, is subtracted after the scale was applied, or None.
      order: [..., in]: input i of the codes is number order[i] of the activations; None: in order.
      offset: is subtracted from every code, besides its zero.
      inputs: of the matrix.
      group: the number of inputs that share a scale; the last group may have fewer.
      fp4: the codes are numbers of e2m1.
      pairs: two codes of 4 bits are a byte.
      in_groups: the codes lie in groups.
      turned: the module's matrix is [in, out].
      rows: the outputs that share a scale in the file.
      divided: `whole` is the inverse of the factor.
      rounds: activations are rounded to 8 bits before they are multiplied (`rounded_activations`).
    """

    codes: Array
    scales: Array
    zeros: Array | None
    whole: Array | None
    order: Array | None
    offset: int = struct.field(pytree_node=False)
    inputs: int = struct.field(pytree_node=False)
    group: int = struct.field(pytree_node=False)
    fp4: bool = struct.field(pytree_node=False)
    pairs: bool = struct.field(pytree_node=False)
    in_groups: bool = struct.field(pytree_node=False)
    turned: bool = struct.field(pytree_node=False)
    least: Array | None = None
    rows: int = struct.field(pytree_node=False, default=1)
    divided: bool = struct.field(pytree_node=False, default=False)
    rounds: bool = struct.field(pytree_node=False, default=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix as the module has it."""
        *stack, outputs, _ = self.codes.shape
        if self.in_groups:
            *stack, _, _, outputs = self.codes.shape
        sizes = self.inputs, outputs
        return (*stack, *(sizes if self.turned else sizes[::-1]))

    @property
    def ndim(self) -> int:
        """The number of axes of the matrix."""
        return self.codes.ndim - (1 if self.in_groups else 0)

    @property
    def size(self) -> int:
        """The number of numbers in the matrix."""
        return math.prod(self.shape)

    def unbox(self) -> PackedKernel:
        return PackedKernel(self)

    def replace_boxed(self, val: Any) -> Any:
        return val

    def add_axis(self, index: int, params: dict) -> NoReturn:
        raise ValueError(
            "a packed kernel cannot be stacked; load the model with dequantise=True to stack it"
        )

    remove_axis = add_axis

    def dense(self, dtype: DTypeLike) -> Array:
        """Returns the matrix as the module has it, in `dtype`."""
        if self.in_groups:
            groups = _widened_groups(self)
            *stack, count, size, outputs = groups.shape
            wide = groups.reshape(*stack, count * size, outputs)[..., : self.inputs, :]
            wide = wide.swapaxes(-1, -2)
        else:
            low, high = _widened(self, False)
            wide = low
            if high is not None:
                both = jnp.stack([low, high], axis=-1)
                wide = both.reshape(*low.shape[:-1], -1)
        if self.order is not None:
            places = jnp.argsort(self.order, axis=-1)
            wide = jnp.take_along_axis(wide, places[..., None, :], axis=-1)
        return (wide.swapaxes(-1, -2) if self.turned else wide).astype(dtype)


def is_packed(leaf: object) -> bool:
    """Returns whether a leaf of parameters is a packed matrix, for `jax.tree`'s `is_leaf`."""
    return isinstance(leaf, Packed)


def holds_packed(params: Weights) -> bool:
    """Returns whether some matrices are packed."""
    return any(map(is_packed, jax.tree.leaves(params, is_leaf=is_packed)))


class PackedKernel:
    """An unboxed `Packed` inside a module: it has a shape, and products take it."""

    def __init__(self, stored: Packed) -> None:
        self.stored = stored
        self.shape = stored.shape
        self.ndim = stored.ndim

    def __len__(self) -> int:
        return self.shape[0]

    def product(self, x: Array, dimensions: DotDimensionNumbers, alone: bool = False) -> Array:
        """Computes `models.products.dot_general` of x [..., in] and the matrix.

        If `alone` is set, the arrays are on one device.  On several, XLA would gather the codes
        that a CPU takes a few outputs of, and those that a GPU's kernel reads.
        """
        summed = 0 if self.stored.turned else 1
        if dimensions != (((x.ndim - 1,), (summed,)), ((), ())):
            raise ValueError(
                f"a packed kernel contracts x's last axis with its axis {summed}, not {dimensions}"
            )
        return _product(x, self.stored, alone)

    def product_in_parts(self, x: Array) -> Array:
        """Computes [P, ..., out] in float32, for arrays on one GPU; their sum over P is the product
        of x [..., in] and the matrix.
        """
        x, packed = _in_order(x, self.stored)
        return _parts_on_gpu(_rounded(x, packed), packed)

    def inputs_of(self, x: Array, numbers: Array) -> Array:
        """Returns rows x [M, in] as the codes of matrices `numbers` [M] of a stack have them."""
        order = self.stored.order
        if order is not None:
            x = jnp.take_along_axis(x, order[numbers], axis=1)
        return _rounded(x, self.stored)

    def product_with(self, x: Array, number: Array, alone: bool) -> Array:
        """Computes x [M, in] times the matrix `number` of a stack, in float32."""
        return _product(x, self.stored, alone, jnp.float32, number)


def _product(
    x: Array,
    packed: Packed,
    alone: bool,
    result: DTypeLike | None = None,
    number: Array | None = None,
) -> Array:
    result = x.dtype if result is None else result

    def one(packed: Packed) -> Packed:
        """Returns the matrix `number` of a stack."""
        if number is None:
            return packed
        cut = functools.partial(jax.lax.dynamic_index_in_dim, index=number, keepdims=False)
        return jax.tree.map(cut, packed)

    x, packed = _in_order(x, packed, number)
    if packed.in_groups:
        x, packed = _rounded(x, packed), one(packed)
        if alone:
            return _parts_on_gpu(x, packed).sum(0).astype(result)
        return _fused(x, packed, result)

    def fused(x: Array, packed: Packed) -> Array:
        return _multiplied(_rounded(x, packed), one(packed), x.dtype, False, result)

    def cpu(x: Array, packed: Packed) -> Array:
        if alone and (coding := coding_of(x.size // x.shape[-1], packed)) is not None:
            x = _kept(x, x.dtype) if coding.rounded else _kept(_rounded(x, packed), x.dtype)
            y = _few_rows(coding, x, packed, number)
            return _kept(y, result).astype(result)
        rows = _rounded(x, packed).reshape(-1, x.shape[-1]).astype(jnp.float32)
        if alone:
            y = _in_tiles(rows, packed, x.dtype, number)
        else:
            y = _multiplied(rows, one(packed), x.dtype, True, jnp.float32)
        return y.astype(result).reshape(*x.shape[:-1], -1)

    return on_cpu(cpu, fused, x, packed)


def _in_order(x: Array, packed: Packed, number: Array | None = None) -> tuple[Array, Packed]:
    """Returns x [..., in] with the inputs as the codes of the matrix, or `number` of a stack, have
    them.
    """
    if packed.order is None:
        return x, packed
    order = packed.order if number is None else packed.order[number]
    return jnp.take(x, order, axis=-1), dataclasses.replace(packed, order=None)


def rounded_activations(x: Array, group: int) -> Array:
    """Returns x [..., in] in float32, rounded to multiples of steps.

    Those of a matrix's groups of inputs, of at most 128, share the step

        step = max |x| / 127.
    """
    together, inputs = kernels.together(group), x.shape[-1]
    padding = (*[(0, 0)] * (x.ndim - 1), (0, -inputs % together))
    parts = jnp.pad(x.astype(jnp.float32), padding).reshape(*x.shape[:-1], -1, together)
    most = jnp.abs(parts).max(-1, keepdims=True)
    step = jnp.maximum(most, 1e-30) * jnp.float32(1 / 127)
    return (jnp.round(parts / step) * step).reshape(*x.shape[:-1], -1)[..., :inputs]


def _rounded(x: Array, packed: Packed) -> Array:
    return rounded_activations(x, packed.group).astype(x.dtype) if packed.rounds else x


def _fused(x: Array, packed: Packed, result: DTypeLike) -> Array:
    """Computes x [..., in] times a matrix whose codes lie in groups."""
    wide = _widened_groups(packed).astype(x.dtype)
    groups, size, _ = wide.shape
    x = jnp.pad(x, (*[(0, 0)] * (x.ndim - 1), (0, groups * size - packed.inputs)))
    parts = x.reshape(*x.shape[:-1], groups, size)
    summed = ((parts.ndim - 2, parts.ndim - 1), (0, 1)), ((), ())
    y = jax.lax.dot_general(parts, wide, summed, preferred_element_type=jnp.float32)
    return y.astype(result)


_OF_GROUPS = ("scales", "zeros", "whole", "least")


def of_kernel(packed: Packed) -> kernels.GpuCodes:
    """Returns a matrix in groups, or a stack of them, as the kernels for a GPU read it."""
    held = {name: getattr(packed, name) for name in _OF_GROUPS}
    there = {name: array for name, array in held.items() if array is not None}
    form = jax.tree.map(lambda part: None, packed)

    def widen(codes: Array, arrays: Sequence[Array]) -> Array:
        given = dict(zip(there, arrays, strict=True))
        return _widened_groups(dataclasses.replace(form, codes=codes, **given), True)

    return kernels.GpuCodes(packed.codes, list(there.values()), widen)


def _parts_on_gpu(x: Array, packed: Packed) -> Array:
    """Returns products [P, ..., out] in float32 whose sum is the product.

    The arrays are on one GPU; P is 1 where no kernel multiplies them.
    """
    if of_kernel(packed).takes(x.size // x.shape[-1], x.dtype):
        return _by_kernel_of_gpu(x, packed)
    return _fused(x, packed, jnp.float32)[None]


@jax.custom_jvp
def _by_kernel_of_gpu(x: Array, packed: Packed) -> Array:
    def gpu(x: Array, packed: Packed) -> Array:
        made = kernels.few_rows_of_codes_on_gpu(x.reshape(-1, x.shape[-1]), of_kernel(packed))
        return made.reshape(-1, *x.shape[:-1], made.shape[-1])

    def other(x: Array, packed: Packed) -> Array:
        more = of_kernel(packed).parts(x.dtype) - 1
        y = _fused(x, packed, jnp.float32)
        return jnp.pad(y[None], ((0, more), *[(0, 0)] * y.ndim))

    return on_cuda(gpu, other, x, packed)


@_by_kernel_of_gpu.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    def fused(x: Array) -> Array:
        return _fused(x, packed, jnp.float32)[None]

    x, packed = primals
    y = _by_kernel_of_gpu(x, packed)
    slope = fused(tangents[0].astype(x.dtype))
    return y, jnp.pad(slope, ((0, len(y) - 1), *[(0, 0)] * (y.ndim - 1)))


def _widened_groups(packed: Packed, by_bits: bool = False) -> Array:
    """Returns [..., groups, inputs of a group, out] in float32."""
    scales = _scales(packed, by_bits)
    wide = _decoder(packed, by_bits)(packed.codes)
    if packed.offset:
        wide = wide - packed.offset
    if packed.zeros is not None:
        wide = wide - packed.zeros.astype(jnp.float32)[..., None, :]
    wide = wide * scales[..., None, :]
    return wide if packed.least is None else wide - packed.least[..., None, :]


def _kept(x: Array, dtype: DTypeLike) -> Array:
    """Returns x in float32, rounded to a dtype in every program (see `products.rounded`)."""
    if x.dtype == dtype == jnp.float32:
        return x
    kept = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x.astype(jnp.float32), kept.nexp, kept.nmant)


def coding_of(rows: int, packed: Packed) -> kernels.Coding | None:
    """Returns the layout of the codes if there is a kernel for some rows and them."""
    return next((each for each in codings(packed) if kernels.takes_codes(rows, each)), None)


def codings(packed: Packed) -> Iterator[kernels.Coding | None]:
    """Returns the layouts that kernels have for the codes, the best one first."""
    if packed.least is not None:
        return
    for rounded in (True, False) if packed.rounds else (False,):
        yield kernels.coding_of(
            packed.codes, packed.scales, packed.zeros, inputs=packed.inputs, group=packed.group,
            offset=packed.offset, pairs=packed.pairs, fp4=packed.fp4, rounded=rounded,
        )  # fmt: skip


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _few_rows(coding: kernels.Coding, x: Array, packed: Packed, number: Array | None) -> Array:
    """Computes x times the matrix in float32, with a kernel."""
    y = kernels.few_rows_of_codes(coding, x, packed.codes, packed.scales, packed.zeros, number)
    if packed.whole is None:
        return y
    whole = packed.whole if number is None else packed.whole[number]
    return y / whole[:, 0] if packed.divided else y * whole[:, 0]


@_few_rows.defjvp
def _(coding: kernels.Coding, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    x, packed, number = primals
    rows = tangents[0].reshape(-1, x.shape[-1]).astype(jnp.float32)
    y = _few_rows(coding, x, packed, number)
    return y, _in_tiles(rows, packed, jnp.float32, number).reshape(y.shape)


def _in_tiles(x: Array, packed: Packed, rounded: DTypeLike, number: Array | None) -> Array:
    """Computes x [M, in] times the matrix, in float32, a few outputs after the other."""
    outputs = packed.codes.shape[-2]
    count = min(_OUTPUTS if len(x) <= _OUTPUTS else 4 * _OUTPUTS, outputs)

    def tile(i: Array, y: Array) -> Array:
        first = i * count  # the last tile begins where its last output is the last of all

        def cut(part: Array) -> Array:
            if number is None:
                return jax.lax.dynamic_slice_in_dim(part, first, count)
            size = (1, count, part.shape[-1])
            return jax.lax.dynamic_slice(part, (number, first, 0), size)[0]

        made = _multiplied(x, jax.tree.map(cut, packed), rounded, True, jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(y, made, first, 1)

    with jax.named_scope("packed"):
        empty = jnp.zeros((len(x), outputs), jnp.float32)
        return jax.lax.fori_loop(0, -(-outputs // count), tile, empty)


def _multiplied(
    x: Array, packed: Packed, rounded: DTypeLike, cpu: bool, result: DTypeLike
) -> Array:
    """Computes x [..., in] times the matrix, whose numbers are first rounded to `rounded`."""

    def times(x: Array, wide: Array) -> Array:
        wide = wide.astype(rounded).astype(x.dtype)
        summed = ((x.ndim - 1,), (1,)), ((), ())
        return jax.lax.dot_general(x, wide, summed, preferred_element_type=jnp.float32)

    low, high = _widened(packed, cpu)
    if high is None:
        return times(x, low).astype(result)
    return (times(x[..., 0::2], low) + times(x[..., 1::2], high)).astype(result)


def _widened(packed: Packed, cpu: bool) -> tuple[Array, Array | None]:
    """Returns the matrix [..., out, in] in float32; or its even and its odd inputs."""
    scales = _scales(packed, cpu)
    group = packed.group // (2 if packed.pairs else 1)

    def scaled(codes: Array, decode: Callable[[Array], Array]) -> Array:
        wide, inputs = decode(codes), codes.shape[-1]
        if packed.offset:
            wide = wide - packed.offset
        if packed.zeros is not None:
            wide = wide - spread(packed.zeros.astype(jnp.float32), inputs)
        wide = wide * spread(scales, inputs)
        return wide if packed.least is None else wide - spread(packed.least, inputs)

    def spread(each: Array, inputs: int) -> Array:
        """Returns [..., out, in] with the number of each input's group."""
        *outer, groups = each.shape
        if groups == 1:
            return each
        many = jnp.broadcast_to(each[..., None], (*outer, groups, group))
        return many.reshape(*outer, groups * group)[..., :inputs]

    if not packed.pairs:
        return scaled(packed.codes, _decoder(packed, cpu)), None
    decode = _decoder(packed, cpu)
    return scaled(packed.codes & 15, decode), scaled(packed.codes >> 4, decode)


def _decoder(packed: Packed, cpu: bool) -> Callable[[Array], Array]:
    if packed.fp4:
        return _fp4_on_cpu if cpu else _fp4
    if packed.codes.dtype == jnp.float8_e4m3fn and cpu:
        return _fp8
    return lambda codes: codes.astype(jnp.float32)


def _scales(packed: Packed, cpu: bool) -> Array:
    """Returns the scales of groups in float32."""
    scales = _scale(packed.scales, cpu)
    if packed.whole is None:
        return scales
    return scales * (1 / packed.whole if packed.divided else packed.whole)


def _scale(scales: Array, cpu: bool) -> Array:
    if scales.dtype == jnp.uint8:
        return jax.lax.bitcast_convert_type(scales.astype(jnp.uint32) << 23, jnp.float32)
    if scales.dtype == jnp.float8_e4m3fn and cpu:
        return _fp8(scales)
    return scales.astype(jnp.float32)


def _fp8(codes: Array) -> Array:
    """Returns numbers of e4m3 in float32, by those of float16 with the same bits.

    XLA:CPU takes ten times as long for `astype`.  Both dtypes have subnormal numbers, and a number
    of float16 with these bits is 2^8 times smaller.
    """
    bits = jax.lax.bitcast_convert_type(codes, jnp.uint8).astype(jnp.uint16)
    return _of_float16(((bits & 0x7F) << 7) | ((bits & 0x80) << 8), 2.0**8)


def _fp4_on_cpu(codes: Array) -> Array:
    """Returns numbers of e2m1 in float32, as `_fp8` those of e4m3."""
    bits = codes.astype(jnp.uint16)
    return _of_float16(((bits & 7) << 9) | ((bits & 8) << 12), 2.0**14)


def _of_float16(bits: Array, factor: float) -> Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * factor


def _fp4(codes: Array) -> Array:
    """Returns numbers of e2m1 in float32: 0, 1/2, 1, 3/2, 2, 3, 4 and 6, and their negatives."""
    bits = codes.astype(jnp.int32)
    fraction, exponent = bits & 1, (bits >> 1) & 3
    halves = jnp.where(exponent == 0, fraction, (2 + fraction) << jnp.maximum(exponent - 1, 0))
    return jnp.where(bits & 8, -halves, halves).astype(jnp.float32) * 0.5
