"""Computes the chosen experts of each token, and reads no others.

`jax.lax.ragged_dot` on a TPU is a kernel whose grid has the chosen experts only.  XLA:CPU makes of
it a product with every expert, for which it masks and copies all of them: `in_tiles` is the form
for arrays on one CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax._internal.platforms import on_cpu
from specjax.models.products import stacked_product


class Stacks(NamedTuple):
    """The weights of a layer's experts, and their biases, if they have some."""

    gate: Array | None  # [E, H, I]; None: an expert has no gate
    up: Array  # [E, H, I]
    down: Array  # [E, I, H]
    biases: tuple[Array, Array, Array] | None = None  # [E, I], [E, I], [E, H]


Gate = Callable[[Array | None, Array], Array]
"""Maps the outputs of gate, if there is one, and up to the input of down."""

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
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=len(stacks.up)).astype(jnp.int32)
    rows, expert = x[order], flat[order]

    def product(rows: Array, stack: Array, which: int) -> Array:
        y = jax.lax.ragged_dot(rows, stack, sizes)
        return y if stacks.biases is None else y + stacks.biases[which][expert]

    gate = None if stacks.gate is None else product(rows, stacks.gate, 0)
    hidden = inner(gate, product(rows, stacks.up, 1))
    return product(hidden, stacks.down, 2)[_inverse(order)]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def in_tiles(inner: Gate, x: Array, chosen: Array, stacks: Stacks) -> Array:
    """Computes `grouped` for arrays on one device; on a CPU one tile after the other.

    A tile is some rows of one expert.  Rows are sorted by expert, so a tile begins where the rows
    of its expert do, or in a later tile of them; where it ends behind them, the next tile writes
    over what it computed too much.
    """
    return on_cpu(
        functools.partial(_in_tiles, inner), functools.partial(grouped, inner), x, chosen, stacks
    )


@in_tiles.defjvp
def _(
    inner: Gate, primals: tuple[Array, Array, Stacks], tangents: tuple[Array, Array, Stacks]
) -> tuple[Array, Array]:
    return jax.jvp(functools.partial(grouped, inner), primals, tangents)


def _in_tiles(inner: Gate, x: Array, chosen: Array, stacks: Stacks) -> Array:
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

        def product(rows: Array, stack: Array, which: int) -> Array:
            y = stacked_product(rows, stack, e)
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
