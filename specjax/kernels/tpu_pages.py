"""Attention of few tokens over pages, and the writing of pages, as kernels for a TPU in Pallas.

XLA would gather the pages of a row into main memory and read them again.  A program of this kernel
is a page of a row: the row's table, which is known before, says which page comes to on-chip memory
while the one before is computed with, so a page is read once.

    table      row 0: 3 1 0        grid    (0, 0): page 3   (0, 1): page 1   (0, 2): page 1, nothing

All key heads of a page come together.  Pages before the first and behind the last slot that a token
of the row sees are neither read nor computed with.  Sums are added page by page, in the order of
the slots, so the bits of a query depend neither on other queries nor on where its pages lie.

XLA's scatter would copy all pages into a layout of its own, and back.  The other kernel reads the
pages that new tokens belong to, puts the tokens in, and writes these pages alone.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

_ROWS = 16  # queries of a key head come in multiples of a tile of bfloat16
_LANES = 128
_MOST_BYTES = 3 * 2**22  # of a kernel's blocks and sums in on-chip memory, which has 2**24
_DTYPES = ("bfloat16", "float32")
_LEAST = float(jnp.finfo(jnp.float32).min)


def takes_pages_on_tpu(query: Array, keys: Array, values: Array) -> bool:
    """Returns whether `few_queries_of_pages_on_tpu` computes the attention of these queries.

    Args:
      query: [B, N, H, D].
      keys, values: pages [P, K, page, D].
    """
    _, width, heads, dim = query.shape
    if heads % keys.shape[1] or not 0 < width:
        return False
    rows = _padded(heads // keys.shape[1] * width)
    lanes = -(-dim // _LANES) * _LANES
    # Of what a program is given and returns there are two, one of them on its way.
    held = keys.shape[1] * rows * (4 * lanes * (query.dtype.itemsize + 1) + 4 * _LANES * 4)
    held += 4 * _page_bytes(keys)
    return (
        keys.shape == values.shape
        and keys.shape[3] == dim
        and keys.shape[2] % _ROWS == 0
        and query.dtype == keys.dtype == values.dtype
        and keys.dtype.name in _DTYPES
        and held <= _MOST_BYTES
    )


def few_queries_of_pages_on_tpu(
    query: Array,
    keys: Array,
    values: Array,
    table: Array,
    visible: Array,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
    interpret: bool = False,
) -> Array:
    """Computes softmax attention over pages, which are read where they lie, in a program for a TPU.

    Args:
      query: [B, N, H, D].
      keys, values: pages [P, K, page, D] of the query's dtype; H is a multiple of K.
      table: [B, T] int32, the numbers of each row's pages.
      visible: [B or 1, N, T * page] bool, such as the mask of a tree behind a text.  Slots that a
        token does not see may have any finite contents.
      scale: of the scores.
      softcap: c of the scores c tanh(x / c), or None.
      sinks: [H], a score of each head with a value of 0, or None.
      interpret: compute what the kernel computes, on any platform, slowly.

    Returns:
      [B, N, H * D] of the query's dtype; 0 for a token that sees no slot and has no sink.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    batch, width, heads, dim = query.shape
    _, key_heads, page, _ = keys.shape
    groups, count = heads // key_heads, table.shape[1]
    queries, rows = groups * width, _padded(groups * width)
    more = rows - queries
    grouped = query.reshape(batch, width, key_heads, groups, dim).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(batch, key_heads, queries, dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, more), (0, 0)))
    masks = visible.reshape(-1, width, count, page).transpose(0, 2, 1, 3)
    masks = jnp.pad(jnp.tile(masks, (1, 1, groups, 1)), ((0, 0), (0, 0), (0, more), (0, 0)))
    seen = visible.any(1).reshape(-1, count, page).any(2)
    first = jnp.argmax(seen, axis=1)
    last = jnp.max(jnp.where(seen, jnp.arange(count) + 1, 0), axis=1)
    bounds = jnp.broadcast_to(jnp.stack([first, last], axis=1).astype(jnp.int32), (batch, 2))
    if sinks is None:
        begun = jnp.full((key_heads, rows, 1), _LEAST, jnp.float32)
    else:
        begun = jnp.repeat(sinks.astype(jnp.float32), width).reshape(key_heads, queries, 1)
        begun = jnp.pad(begun, ((0, 0), (0, more), (0, 0)))

    def kept(row: Any, number: Any, table: Any, bounds: Any) -> tuple[Any, ...]:
        # A page that is asked for again is not read again.
        last = jnp.maximum(bounds[row, 1] - 1, 0)
        return table[row, jnp.clip(number, jnp.minimum(bounds[row, 0], last), last)], 0, 0, 0

    shared = len(masks) == 1
    of_page = pl.BlockSpec((1, key_heads, page, dim), kept)
    of_row = pl.BlockSpec((1, key_heads, rows, dim), lambda row, number, *_: (row, 0, 0, 0))
    of_mask = pl.BlockSpec(
        (1, 1, rows, page), lambda row, number, *_: (0 if shared else row, number, 0, 0)
    )
    of_sinks = pl.BlockSpec((key_heads, rows, 1), lambda row, number, *_: (0, 0, 0))
    sums = pltpu.VMEM((key_heads, rows, _LANES), jnp.float32)
    made = pl.pallas_call(
        functools.partial(_kernel, scale, softcap, sinks is not None, count),
        out_shape=jax.ShapeDtypeStruct((batch, key_heads, rows, dim), query.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, count),
            in_specs=[of_row, of_page, of_page, of_mask, of_sinks],
            out_specs=of_row,
            scratch_shapes=[sums, sums, pltpu.VMEM((key_heads, rows, dim), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="few_queries_of_pages",
    )(table.astype(jnp.int32), bounds, grouped, keys, values, masks.astype(jnp.int32), begun)
    made = made[:, :, :queries].reshape(batch, key_heads, groups, width, dim)
    return made.transpose(0, 3, 1, 2, 4).reshape(batch, width, heads * dim)


def writes_pages_on_tpu(pages: Array, new: Array) -> bool:
    """Returns whether `write_pages_on_tpu` writes `new` [B, K, N, D] into pages [P, K, page, D]."""
    _, _, page, _ = pages.shape
    tokens = -(-new.shape[2] // _ROWS) * _ROWS
    held = 4 * _page_bytes(pages) + 2 * _page_bytes(pages) // page * tokens
    return pages.dtype.name in _DTYPES and page % _ROWS == 0 and held <= _MOST_BYTES


def _page_bytes(pages: Array) -> int:
    """Returns the bytes of a page in on-chip memory."""
    _, heads, page, dim = pages.shape
    return heads * page * -(-dim // _LANES) * _LANES * pages.dtype.itemsize


def write_pages_on_tpu(
    pages: Array, new: Array, table: Array, start: Array, interpret: bool = False
) -> Array:
    """Writes the tokens `new` [B, K, N, D] into pages [P, K, page, D], in a program for a TPU.

    Args:
      pages: the page 0 is never changed.
      new: of the dtype of the pages, and finite.
      table: [B, T] int32, the numbers of each row's pages; what belongs to a page 0 is dropped.
      start: [B] int32, the slot of the row's first new token.
      interpret: compute what the kernel computes, on any platform, slowly.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    batch, heads, width, dim = new.shape
    page = pages.shape[2]
    most = -(-(width - 1) // page) + 1  # pages that so many tokens may belong to
    more = -(-width // _ROWS) * _ROWS - width
    new = jnp.pad(new, ((0, 0), (0, 0), (0, more), (0, 0)))
    numbers = start[:, None] // page + jnp.arange(most)
    written = (numbers * page < start[:, None] + width) & (numbers < table.shape[1])
    held = jnp.take_along_axis(table, jnp.minimum(numbers, table.shape[1] - 1), axis=1)
    # A page that gets nothing could be that of the step before, whose tokens are on their way.
    places = jnp.where(written, held, 0).astype(jnp.int32)

    of_row = pl.BlockSpec((1, heads, width + more, dim), lambda row, number, *_: (row, 0, 0, 0))
    of_page = pl.BlockSpec(
        (1, heads, page, dim), lambda row, number, places, start: (places[row, number], 0, 0, 0)
    )
    return pl.pallas_call(
        functools.partial(_writing, width),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=(batch, most), in_specs=[of_row, of_page],
            out_specs=of_page,
        ),
        input_output_aliases={3: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=interpret,
        name="write_pages",
    )(places, start.astype(jnp.int32), new, pages)  # fmt: skip


def _writing(width: int, places: Any, start: Any, new: Any, pages: Any, out: Any) -> None:
    """Puts the tokens of a row into one of its pages."""
    from jax.experimental import pallas as pl

    row, number = pl.program_id(0), pl.program_id(1)
    _, heads, page, _ = out.shape
    tokens = new.shape[2]
    at = start[row]
    # The token of the page's first slot; `//` would ask which TPU this process has.
    first = (jax.lax.div(at, jnp.int32(page)) + number) * page - at
    slot = jax.lax.broadcasted_iota(jnp.int32, (page, tokens), 0)
    token = jax.lax.broadcasted_iota(jnp.int32, (page, tokens), 1)
    # One number of a row is 1, so products are exact.
    chosen = jnp.where(token == slot + first, 1.0, 0.0).astype(new.dtype)
    here = jax.lax.broadcasted_iota(jnp.int32, (page, 1), 0) + first
    puts = (here >= 0) & (here < width) & (places[row, number] != 0)
    for head in range(heads):
        put = _product(chosen, new[0, head], 0)
        kept = pages[0, head].astype(jnp.float32)
        out[0, head] = jnp.where(puts, put, kept).astype(out.dtype)


def _padded(queries: int) -> int:
    return -(-queries // _ROWS) * _ROWS


def _kernel(
    scale: float,
    softcap: float | None,
    sunk: bool,
    count: int,
    table: Any,
    bounds: Any,
    query: Any,
    keys: Any,
    values: Any,
    masks: Any,
    begun: Any,
    out: Any,
    mosts: Any,
    totals: Any,
    mixed: Any,
) -> None:
    """Adds one page to the sums of a row's queries."""
    from jax.experimental import pallas as pl

    del table
    row, number = pl.program_id(0), pl.program_id(1)
    heads, rows, dim = mixed.shape

    @pl.when(number == 0)
    def _() -> None:
        for head in range(heads):
            mosts[head] = jnp.broadcast_to(begun[head], (rows, _LANES))
            totals[head] = jnp.full((rows, _LANES), 1.0 if sunk else 0.0, jnp.float32)
            mixed[head] = jnp.zeros((rows, dim), jnp.float32)

    @pl.when((bounds[row, 0] <= number) & (number < bounds[row, 1]))
    def _() -> None:
        seen = masks[0, 0] != 0
        for head in range(heads):
            scores = _product(query[0, head], keys[0, head], 1) * scale
            if softcap is not None:
                scores = softcap * jnp.tanh(scores / softcap)
            most = mosts[head][:, :1]
            higher = jnp.maximum(most, jnp.where(seen, scores, _LEAST).max(1, keepdims=True))
            weights = jnp.where(seen, jnp.exp(scores - higher), 0.0)
            shrink = jnp.exp(most - higher)
            total = totals[head][:, :1] * shrink + weights.sum(1, keepdims=True)
            added = _product(weights.astype(values.dtype), values[0, head], 0)
            mixed[head] = mixed[head] * shrink + added
            mosts[head] = jnp.broadcast_to(higher, (rows, _LANES))
            totals[head] = jnp.broadcast_to(total, (rows, _LANES))

    @pl.when(number == count - 1)
    def _() -> None:
        for head in range(heads):
            total = totals[head][:, :1]
            out[0, head] = (mixed[head] / jnp.where(total == 0, 1.0, total)).astype(out.dtype)


def _product(x: Array, y: Array, summed: int) -> Array:
    """Multiplies two matrices; by default those of float32 would be rounded to bfloat16."""
    exact = x.dtype == jnp.float32
    return jax.lax.dot_general(
        x,
        y,
        (((1,), (summed,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )
