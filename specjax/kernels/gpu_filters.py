"""The least logit that top-k, top-p and min-p keep, found by one kernel for each pass on a GPU.

XLA:GPU makes two kernels of each pass over the vocabulary, and more for a softmax.  These kernels
find the digits of a threshold from the first one on, `_BITS` bits a pass.  A pass adds, in blocks
of `_TILE` tokens, what every value of its digit would keep.  The next pass adds the blocks, in
their order, and goes on from the greatest digit that keeps enough.  A row whose filter is off reads
no logits.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

_BITS = 6
_DIGITS = 1 << _BITS
_TILE, _PART = 1024, 128  # tokens of a block, and those that are compared at a time
_SHIFTS = (26, 20, 14, 8, 2, 0)
"""The lowest bit of each digit; the last digit has the two bits that are left."""

_PARTS = 64  # blocks that are added at a time


def least_kept_on_gpu(
    scaled: Array,
    best: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    interpret: bool = False,
) -> Array:
    """Finds the least logit that the filters keep, by a program for one GPU.

    Args:
      scaled: [B, N, V] float32 logits, after the temperature.
      best: [B, N] int32, the token with the greatest of them.
      top_k: [B] int32; 0 keeps all.
      top_p, min_p: [B] float32; 1 and 0 keep all.
      interpret: compute what the kernels compute, on any platform, slowly.

    Returns:
      [B, N, 1] float32; -inf where all tokens are kept.
    """
    batch, width, size = scaled.shape
    sizes = _Sizes(batch * width, width, size, -(-size // _TILE))
    given = (scaled.reshape(sizes.rows, size), best.reshape(sizes.rows), top_k, top_p, min_p)
    found: list[Array] = []
    for number in range(2 * len(_SHIFTS)):
        shapes = [
            jax.ShapeDtypeStruct((sizes.rows, sizes.tiles, _DIGITS), jnp.float32),
            jax.ShapeDtypeStruct((sizes.rows, _KNOWN), jnp.uint32),
        ]
        kernel = functools.partial(_one_pass, sizes, number)
        found = _call(kernel, sizes, sizes.tiles, given, found, shapes, interpret)
    shapes = [jax.ShapeDtypeStruct((sizes.rows, 1), jnp.float32)]
    kernel = functools.partial(_chosen, sizes)
    (least,) = _call(kernel, sizes, 1, given, found, shapes, interpret)
    return least.reshape(batch, width, 1)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    rows: int  # of logits
    width: int  # of them, of a row of settings
    tokens: int
    tiles: int  # blocks of tokens


def _call(
    kernel: Any,
    sizes: _Sizes,
    blocks: int,
    given: tuple[Array, ...],
    found: list[Array],
    shapes: list[jax.ShapeDtypeStruct],
    interpret: bool,
) -> list[Array]:
    """Runs a kernel for each row of logits, in `blocks` programs."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    def whole(array: Any) -> Any:
        return pl.BlockSpec(array.shape, lambda tile, row: (0,) * array.ndim)

    def of_row(array: Any) -> Any:
        zeros = (0,) * (array.ndim - 1)
        return pl.BlockSpec((None, *array.shape[1:]), lambda tile, row: (row, *zeros))

    logits, *settings = given
    return pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid=(blocks, sizes.rows),
        in_specs=[of_row(logits), *map(whole, settings), *map(of_row, found)],
        out_specs=[*map(of_row, shapes)],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="filters",
    )(*given, *found)


@dataclasses.dataclass(frozen=True)
class _Row:
    """References to what is given of a row."""

    logits: Any  # [V]
    greatest: Any  # the index of the greatest logit
    top_k: Any
    top_p: Any
    min_p: Any

    @classmethod
    def of(cls, sizes: _Sizes, given: tuple[Any, ...]) -> _Row:
        from jax.experimental import pallas as pl

        row = pl.program_id(1)
        logits, best, *settings = given
        return cls(logits, best[row], *(x[row // sizes.width] for x in settings))

    def most(self) -> Array:
        from jax.experimental.pallas import triton

        return triton.load(self.logits.at[self.greatest])

    def wanted(self, number: int, total: Array) -> Array:
        """Returns the sum that the tokens that are kept must reach."""
        if number < len(_SHIFTS):
            return self.top_k.astype(jnp.float32)
        # Many devices flush a subnormal top_p to 0, which even an empty set of tokens reaches.
        return jnp.maximum(self.top_p, jnp.finfo(jnp.float32).tiny) * total

    def is_on(self, number: int) -> Array:
        return self.top_k > 0 if number < len(_SHIFTS) else self.top_p < 1


_FLOOR, _PREFIX, _TOTAL, _KNOWN = 0, 1, 2, 4
"""What is known of a row, in an array of `_KNOWN` numbers: the threshold of top-k, the digits of
the next threshold that are found, and the bits of the sum of all terms."""


def _found(tiles: int, number: int, row: _Row, sums: Any, known: Any) -> tuple[Array, ...]:
    """Returns what is known after the pass `number`, from its sums."""
    from jax.experimental.pallas import triton

    floor, prefix, bits = known[_FLOOR], known[_PREFIX], known[_TOTAL]
    turn = number % len(_SHIFTS)
    digit = jnp.arange(_DIGITS)

    def add(part: Array, held: Array) -> Array:
        at = part * _PARTS + jnp.arange(_PARTS)
        shape = _PARTS, _DIGITS
        block = jnp.broadcast_to(at[:, None], shape)
        added = triton.load(
            sums.at[block, jnp.broadcast_to(digit[None], shape)], mask=block < tiles, other=0.0
        )
        return held + added.sum(0)

    held = jax.lax.fori_loop(0, -(-tiles // _PARTS), add, jnp.zeros(_DIGITS, jnp.float32))
    total = jax.lax.bitcast_convert_type(bits, jnp.float32)
    if turn == 0:
        total = jnp.where(digit == 0, held, 0.0).sum()
        bits = jax.lax.bitcast_convert_type(total, jnp.uint32)
    enough = (held >= row.wanted(number, total)) & (digit > 0)
    above = 32 if turn == 0 else _SHIFTS[turn - 1]
    enough &= digit < 1 << (above - _SHIFTS[turn])
    prefix = prefix | (enough.astype(jnp.int32).sum().astype(jnp.uint32) << _SHIFTS[turn])
    if turn == len(_SHIFTS) - 1:
        found = jnp.where(row.is_on(number), prefix, jnp.uint32(0))
        floor, prefix = jnp.maximum(floor, found), jnp.uint32(0)
    return floor, prefix, bits


def _order(x: Array) -> Array:
    """Returns unsigned integers in the order of the floats; the two zeros are one value."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _one_pass(sizes: _Sizes, number: int, *references: Any) -> None:
    """Adds what each value of a digit would keep of a block of tokens."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    tile, row = pl.program_id(0), _Row.of(sizes, references[:5])
    floor = prefix = bits = jnp.uint32(0)
    if number > 0:
        floor, prefix, bits = _found(sizes.tiles, number - 1, row, *references[5:7])
    out_sums, out_known = references[-2:]

    @pl.when(tile == 0)
    def _() -> None:
        out_known[_FLOOR], out_known[_PREFIX], out_known[_TOTAL] = floor, prefix, bits

    of_mass = number >= len(_SHIFTS)
    digit = jnp.arange(_DIGITS)
    candidates = prefix | (digit.astype(jnp.uint32) << _SHIFTS[number % len(_SHIFTS)])

    def add(part: Array, held: Array) -> Array:
        at = tile * _TILE + part * _PART + jnp.arange(_PART)
        x = triton.load(row.logits.at[at], mask=at < sizes.tokens, other=-jnp.inf)
        order = _order(x)
        kept = (at < sizes.tokens) & (order >= floor)
        terms = jnp.where(kept, jnp.exp(x - most) if of_mass else 1.0, 0.0)
        return held + jnp.where(order[None] >= candidates[:, None], terms[None], 0.0)

    most = row.most() if of_mass else 0.0

    @pl.when(row.is_on(number))
    def _() -> None:
        begun = jnp.zeros((_DIGITS, _PART), jnp.float32)
        held = jax.lax.fori_loop(0, _TILE // _PART, add, begun)
        triton.store(out_sums.at[jnp.full(_DIGITS, tile), digit], held.sum(1))


def _chosen(sizes: _Sizes, *references: Any) -> None:
    """Stores the least logit of a row that all filters keep."""
    row = _Row.of(sizes, references[:5])
    floor, _, _ = _found(sizes.tiles, 2 * len(_SHIFTS) - 1, row, *references[5:7])
    bits = jnp.where(floor >> 31 == 1, floor ^ jnp.uint32(1 << 31), ~floor)
    kept = jnp.where(floor == 0, -jnp.inf, jax.lax.bitcast_convert_type(bits, jnp.float32))
    references[-1][0] = jnp.maximum(kept, row.most() + jnp.log(row.min_p))
