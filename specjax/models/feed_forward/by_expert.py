"""Computes the chosen experts of each token, and reads no others.

`jax.lax.ragged_dot` on a TPU is a kernel whose grid has the chosen experts only, if the number of
rows is a multiple of 8; otherwise XLA makes of it a product with every expert.  XLA:CPU and XLA:GPU
do so always, and the former masks and copies all of them: `in_tiles` is the form for arrays on one
CPU, and `by_kernel` for arrays on one NVIDIA GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax._internal.platforms import on_cpu, on_cuda
from specjax.kernels import GpuCodes, few_experts_on_gpu, takes_experts_on_gpu
from specjax.models.packed import Packed, PackedKernel, of_kernel
from specjax.models.products import stacked_product


class Stacks(NamedTuple):
    """The weights of a layer's experts, and their biases, if they have some."""

    gate: Array | PackedKernel | None  # [E, H, I]; None: an expert has no gate
    up: Array | PackedKernel  # [E, H, I]
    down: Array | PackedKernel  # [E, I, H]
    biases: tuple[Array, Array, Array] | None = None  # [E, I], [E, I], [E, H]

    def stored(self) -> Stacks:
        """Returns the stacks as a tree of arrays."""
        return self._each(lambda stack: stack.stored if isinstance(stack, PackedKernel) else stack)

    def unboxed(self) -> Stacks:
        """Returns the stacks of `stored` as products take them."""
        return self._each(lambda stack: stack.unbox() if isinstance(stack, Packed) else stack)

    def _each(self, make: Callable[[Any], Any]) -> Stacks:
        return Stacks(make(self.gate), make(self.up), make(self.down), self.biases)

    @property
    def some_packed(self) -> bool:
        """Returns whether at least one of the stacks is packed."""
        return any(isinstance(stack, PackedKernel) for stack in self[:3])


Gate = Callable[[Array | None, Array], Array]
"""Maps the outputs of gate, if there is one, and up to the input of down."""

_ROWS_OF_KERNEL = 8
"""The kernel of a TPU takes a multiple of it; rows of no expert fill up the last ones."""

_LARGEST_TILE = 128
_SMALLEST_TILE = 8
"""Rows that a tile may have, although most experts have fewer: reading an expert takes longer than
multiplying these with it.
"""


def grouped(inner: Gate, x: Array, chosen: Array, stacks: Stacks) -> Array:
    """Computes K experts for each of T tokens: P = T * K pairs of a token and an expert.

    Args:
      inner: joins the outputs of an expert's gate and up.
      x: [P, H], the input of each pair; the K pairs of a token follow each other.
      chosen: [T, K] int32, the experts of each token, which are distinct.
      stacks: the weights.

    Returns:
      [P, H] in the dtype of x.
    """
    if stacks.some_packed:
        # `ragged_dot` would need the wide numbers of every expert in memory.
        return _in_tiles(inner, x, chosen, stacks, False)
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=len(stacks.up)).astype(jnp.int32)
    more = -len(flat) % _ROWS_OF_KERNEL
    rows, expert = jnp.pad(x[order], ((0, more), (0, 0))), jnp.pad(flat[order], (0, more))

    def product(rows: Array, stack: Array | PackedKernel, which: int) -> Array:
        assert isinstance(stack, jax.Array)
        y = jax.lax.ragged_dot(rows, stack, sizes)
        return y if stacks.biases is None else y + stacks.biases[which][expert]

    with jax.named_scope(f"pairs_{len(flat)}"):  # that `bench.tpu` counts
        gate = None if stacks.gate is None else product(rows, stacks.gate, 0)
        hidden = inner(gate, product(rows, stacks.up, 1))
        out = product(hidden, stacks.down, 2)
    return out[_inverse(order)]


def in_tiles(inner: Gate, x: Array, chosen: Array, stacks: Stacks) -> Array:
    """Computes `grouped` for arrays on one device; on a CPU one tile after the other.

    A tile is some rows of one expert.  Rows are sorted by expert, so a tile begins where the rows
    of its expert do, or in a later tile of them; where it ends behind them, the next tile writes
    over what it computed too much.
    """
    if stacks.some_packed:
        return _in_tiles(inner, x, chosen, stacks)
    return _with_slopes(_on_cpu, inner, x, chosen, stacks)


def by_kernel(inner: Gate, x: Array, chosen: Array, stacks: Stacks) -> Array:
    """Computes `grouped` for arrays on one GPU; for few tokens on an NVIDIA GPU with a kernel."""
    ours = [stack for stack in stacks[:3] if stack is not None]
    if all(_taken(x, chosen, stack) for stack in ours):
        return _with_slopes(_on_gpu, inner, x, chosen, stacks.stored())
    return grouped(inner, x, chosen, stacks)


def _taken(x: Array, chosen: Array, stack: Array | PackedKernel) -> bool:
    if isinstance(stack, PackedKernel):
        return takes_experts_on_gpu(x, chosen, of_kernel(stack.stored))
    return x.dtype == stack.dtype and takes_experts_on_gpu(x, chosen, GpuCodes.plain(stack))


_Form = Callable[[Gate, Array, Array, Stacks], Array]


def _on_cpu(inner: Gate, x: Array, chosen: Array, stacks: Stacks) -> Array:
    forms = (functools.partial(form, inner) for form in (_in_tiles, grouped))
    return on_cpu(*forms, x, chosen, stacks)


def _on_gpu(inner: Gate, x: Array, chosen: Array, stacks: Stacks) -> Array:
    forms = (functools.partial(_unboxed, form, inner) for form in (_by_kernel, grouped))
    return on_cuda(*forms, x, chosen, stacks)


def _unboxed(form: _Form, inner: Gate, x: Array, chosen: Array, stacks: Stacks) -> Array:
    return form(inner, x, chosen, stacks.unboxed())


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _with_slopes(form: _Form, inner: Gate, x: Array, chosen: Array, stacks: Stacks) -> Array:
    """Computes a form of `grouped`, whose derivatives are those of `grouped` itself.

    The stacks are `stored`.
    """
    return form(inner, x, chosen, stacks)


@_with_slopes.defjvp
def _(
    form: _Form,
    inner: Gate,
    primals: tuple[Array, Array, Stacks],
    tangents: tuple[Array, Array, Stacks],
) -> tuple[Array, Array]:
    return jax.jvp(functools.partial(_unboxed, grouped, inner), primals, tangents)


def _by_kernel(inner: Gate, x: Array, chosen: Array, stacks: Stacks) -> Array:
    flat = chosen.reshape(-1)

    def added(y: Array, which: int) -> Array:
        return y if stacks.biases is None else y + stacks.biases[which][flat]

    with jax.named_scope(f"pairs_{len(flat)}"):  # that `bench.gpu` counts
        inward = [stack for stack in (stacks.gate, stacks.up) if stack is not None]
        *gates, up = _products(x, chosen, inward)
        hidden = inner(added(gates[0], 0) if gates else None, added(up, 1))
        return added(_products(hidden, chosen, [stacks.down])[0], 2)


def _products(x: Array, chosen: Array, stacks: Sequence[Array | PackedKernel]) -> list[Array]:
    """Multiplies the pairs with each stack, and with all of them at once if they are alike."""
    flat = chosen.reshape(-1)

    def parted(stack: Array | PackedKernel) -> tuple[Array, GpuCodes]:
        if isinstance(stack, PackedKernel):
            return stack.inputs_of(x, flat), of_kernel(stack.stored)
        return x, GpuCodes.plain(stack)

    inputs, codes = zip(*map(parted, stacks), strict=True)
    if all(rows is x for rows in inputs) and len({form.shapes for form in codes}) == 1:
        return few_experts_on_gpu(x, chosen, codes)
    pairs = zip(inputs, codes, strict=True)
    return [few_experts_on_gpu(rows, chosen, [form])[0] for rows, form in pairs]


def _in_tiles(inner: Gate, x: Array, chosen: Array, stacks: Stacks, alone: bool = True) -> Array:
    experts, (tokens, count) = len(stacks.up), chosen.shape
    pairs = tokens * count
    size = tile_size(tokens, count, experts)
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    many = jnp.bincount(flat, length=experts).astype(jnp.int32)
    starts = jnp.cumsum(many) - many
    tiles = -(-many // size)
    ends = jnp.cumsum(tiles)
    number = jnp.arange(min(pairs, experts + pairs // size))  # at least as many as there are tiles
    expert = jnp.searchsorted(ends, number, side="right").astype(jnp.int32)
    first = starts[expert] + (number - (ends - tiles)[expert]) * size
    rows = jnp.pad(x[order], ((0, size), (0, 0)))

    def tile(i: Array, out: Array) -> Array:
        e, at = expert[i], first[i]
        mine = jax.lax.dynamic_slice_in_dim(rows, at, size)

        def product(rows: Array, stack: Array | PackedKernel, which: int) -> Array:
            y = stacked_product(rows, stack, e, alone)
            return y if stacks.biases is None else y + stacks.biases[which][e].astype(y.dtype)

        gate = None if stacks.gate is None else product(mine, stacks.gate, 0)
        hidden = inner(gate, product(mine, stacks.up, 1))
        added = product(hidden.astype(x.dtype), stacks.down, 2)
        return jax.lax.dynamic_update_slice_in_dim(out, added, at, 0)

    out = jnp.zeros((len(rows), stacks.down.shape[2]), jnp.float32)
    with jax.named_scope("tiles"):
        out = jax.lax.fori_loop(0, ends[-1], tile, out)
    return out[_inverse(order)].astype(x.dtype)


def tile_size(tokens: int, count: int, experts: int) -> int:
    """Returns the rows of a tile, for `count` of `experts` experts for each token.

    An expert has at most one row of each token, so a tile of as many rows as there are tokens reads
    each chosen expert once.  Of many tokens most experts have about twice the mean or fewer.
    """
    mean = -(-2 * tokens * count // experts)
    return min(tokens, max(_SMALLEST_TILE, 1 << (mean - 1).bit_length()), _LARGEST_TILE)


def _inverse(order: Array) -> Array:
    """Returns the permutation that undoes `order`."""
    return jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype))
