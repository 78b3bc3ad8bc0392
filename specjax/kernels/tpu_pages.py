"""Attention of few tokens over pages, and the writing of pages, as kernels for a TPU in Pallas.

XLA would gather the pages of a row into main memory and read them again.  A program of this kernel
is a page of a row: the row's table, which is known before, says which page comes to on-chip memory
while the one before is computed with, so a page is read once.

    table      row 0: 3 1 0        grid    (0, 0): page 3   (0, 1): page 1   (0, 2): page 1, nothing

Pages of 8 bits become numbers in on-chip memory.  Latent vectors, which are values and a part of
the keys, come once for both.

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
_ROUNDED = ("int8", "float8_e4m3fn")
_SCALE = 4  # the last bytes of a token in int8 pages are its scale, a float32
_LEAST = float(jnp.finfo(jnp.float32).min)


Parts = Array | tuple[Array, ...]
"""An array, or the parts of queries and keys whose scores are summed."""


def takes_pages_on_tpu(query: Parts, keys: Parts, values: Array | None) -> bool:
    """Returns whether `few_queries_of_pages_on_tpu` computes the attention of these queries.

    The arguments are those of that function.
    """
    queries, pools = _parts(query), _parts(keys)
    _, width, heads, _ = queries[0].shape
    key_heads, page = pools[0].shape[1:3]
    held_values = pools[0] if values is None else values
    kind, stored = queries[0].dtype, pools[0].dtype
    if heads % key_heads or not 0 < width or len(queries) != len(pools):
        return False
    rows = _padded(heads // key_heads * width)
    out = _lanes(_read_size(held_values))
    given = sum(_lanes(part.shape[3]) for part in queries)
    # Of what a program is given and returns there are two, one of them on its way.
    held = key_heads * rows * (2 * (given + out) * kind.itemsize + 4 * out + 4 * _LANES * 4)
    held += 2 * sum(map(_page_bytes, pools if values is None else (*pools, values)))
    if stored != kind:  # the pages of a head as numbers
        held += 8 * page * (max(given, out))
    return (
        all(part.shape[3] == _read_size(pool) for part, pool in zip(queries, pools, strict=True))
        and all(x.shape[:3] == pools[0].shape[:3] for x in (*pools, held_values))
        and all(part.dtype == kind for part in queries)
        and all(x.dtype == stored for x in (*pools, held_values))
        and page % _ROWS == 0
        and kind.name in _DTYPES
        and (stored == kind or stored.name in _ROUNDED)
        and held <= _MOST_BYTES
    )


def few_queries_of_pages_on_tpu(
    query: Parts,
    keys: Parts,
    values: Array | None,
    table: Array,
    visible: Array,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
    interpret: bool = False,
) -> Array:
    """Computes softmax attention over pages, which are read where they lie, in a program for a TPU.

    Args:
      query: [B, N, H, D], or parts of several sizes D, whose scores are summed.
      keys: pages [P, K, page, D], of the query's dtype or of 8 bits as a cache stores them
        (`specjax.caches.stored`); H is a multiple of K.  As many parts as `query` has.
      values: pages [P, K, page, V] of the dtype of `keys`; None: they are the first part of the
        keys, as in latent attention, and are read once for both.
      table: [B, T] int32, the numbers of each row's pages.
      visible: [B or 1, N, T * page] bool, such as the mask of a tree behind a text.  Slots that a
        token does not see may have any finite contents.
      scale: of the scores.
      softcap: c of the scores c tanh(x / c), or None.
      sinks: [H], a score of each head with a value of 0, or None.
      interpret: compute what the kernel computes, on any platform, slowly.

    Returns:
      [B, N, H * V] of the query's dtype; 0 for a token that sees no slot and has no sink.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    parts, pools = _parts(query), list(_parts(keys))
    pools += [] if values is None else [values]
    held_values = pools[0] if values is None else values
    batch, width, heads, _ = parts[0].shape
    _, key_heads, page, _ = pools[0].shape
    dim, kind = _read_size(held_values), parts[0].dtype
    groups, count = heads // key_heads, table.shape[1]
    queries, rows = groups * width, _padded(groups * width)
    more = rows - queries

    def grouped(part: Array) -> Array:
        split = part.reshape(batch, width, key_heads, groups, -1).transpose(0, 2, 3, 1, 4)
        split = split.reshape(batch, key_heads, queries, -1)
        return jnp.pad(split, ((0, 0), (0, 0), (0, more), (0, 0)))

    masks = visible.reshape(-1, width, count, page).transpose(0, 2, 1, 3)
    if width > 1:  # the mask of a single token is that of all its heads
        masks = jnp.tile(masks, (1, 1, groups, 1))
        masks = jnp.pad(masks, ((0, 0), (0, 0), (0, more), (0, 0)))
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

    def of_row(size: int) -> Any:
        return pl.BlockSpec((1, key_heads, rows, size), lambda row, number, *_: (row, 0, 0, 0))

    shared = len(masks) == 1
    of_mask = pl.BlockSpec(
        (1, 1, *masks.shape[2:]), lambda row, number, *_: (0 if shared else row, number, 0, 0)
    )
    of_sinks = pl.BlockSpec((key_heads, rows, 1), lambda row, number, *_: (0, 0, 0))
    sums = pltpu.VMEM((key_heads, rows, _LANES), jnp.float32)
    made = pl.pallas_call(
        functools.partial(
            _kernel, len(parts), values is None, scale, softcap, sinks is not None, count
        ),
        out_shape=jax.ShapeDtypeStruct((batch, key_heads, rows, dim), kind),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, count),
            in_specs=[
                *(of_row(part.shape[3]) for part in parts),
                *(pl.BlockSpec((1, *pool.shape[1:]), kept) for pool in pools),
                of_mask,
                of_sinks,
            ],
            out_specs=of_row(dim),
            scratch_shapes=[sums, sums, pltpu.VMEM((key_heads, rows, dim), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="few_queries_of_pages",
    )(
        table.astype(jnp.int32), bounds, *map(grouped, parts), *pools, masks.astype(jnp.int32),
        begun,
    )  # fmt: skip
    made = made[:, :, :queries].reshape(batch, key_heads, groups, width, dim)
    return made.transpose(0, 3, 1, 2, 4).reshape(batch, width, heads * dim)


def writes_pages_on_tpu(pages: Array, new: Array) -> bool:
    """Returns whether `write_pages_on_tpu` writes `new` [B, K, N, D] into pages [P, K, page, D]."""
    _, _, page, _ = pages.shape
    tokens = -(-new.shape[2] // _ROWS) * _ROWS
    held = 4 * _page_bytes(pages) + 2 * _page_bytes(pages) // page * tokens
    return pages.dtype.name in (*_DTYPES, *_ROUNDED) and page % _ROWS == 0 and held <= _MOST_BYTES


def _parts(x: Parts) -> tuple[Array, ...]:
    return x if isinstance(x, tuple) else (x,)


def _read_size(pages: Array) -> int:
    """Returns the numbers of a token that pages [..., D] hold for a head."""
    return pages.shape[-1] - _SCALE * (pages.dtype == jnp.int8)


def _lanes(size: int) -> int:
    return -(-size // _LANES) * _LANES


def _page_bytes(pages: Array) -> int:
    """Returns the bytes of a page in on-chip memory."""
    _, heads, page, dim = pages.shape
    return heads * page * _lanes(dim) * pages.dtype.itemsize


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

    if pages.dtype.name in _ROUNDED[1:]:
        bytes_of = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.int8)
        made = write_pages_on_tpu(bytes_of(pages), bytes_of(new), table, start, interpret)
        return jax.lax.bitcast_convert_type(made, pages.dtype)
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
    kind = jnp.bfloat16 if new.dtype == jnp.int8 else new.dtype
    chosen = jnp.where(token == slot + first, 1.0, 0.0).astype(kind)
    here = jax.lax.broadcasted_iota(jnp.int32, (page, 1), 0) + first
    puts = (here >= 0) & (here < width) & (places[row, number] != 0)
    for head in range(heads):
        put = _product(chosen, _exactly(new[0, head], kind), 0)
        kept = _exactly(pages[0, head], jnp.float32)
        out[0, head] = _exactly(jnp.where(puts, put, kept), out.dtype)


def _exactly(x: Array, kind: Any) -> Array:
    """Returns numbers that `kind` holds exactly; a chip goes from and to bytes by 32 bits."""
    if jnp.int8 in (x.dtype, kind):
        x = x.astype(jnp.int32)
        x = x if kind == jnp.int8 else x.astype(jnp.float32)
    return x.astype(kind)


def _padded(queries: int) -> int:
    return -(-queries // _ROWS) * _ROWS


def _kernel(
    parts: int,
    joined: bool,
    scale: float,
    softcap: float | None,
    sunk: bool,
    count: int,
    table: Any,
    bounds: Any,
    *arrays: Any,
) -> None:
    """Adds one page to the sums of a row's queries.

    Args:
      parts: of the queries and keys, which come first in `arrays`, then the values.
      joined: the values are the first part of the keys.
    """
    from jax.experimental import pallas as pl

    del table
    queries, keys, (*rest,) = arrays[:parts], arrays[parts : 2 * parts], arrays[2 * parts :]
    values = keys[0] if joined else rest.pop(0)
    masks, begun, out, mosts, totals, mixed = rest
    row, number = pl.program_id(0), pl.program_id(1)
    heads, rows, dim = mixed.shape
    kind = out.dtype

    @pl.when(number == 0)
    def _() -> None:
        for head in range(heads):
            mosts[head] = jnp.broadcast_to(begun[head], (rows, _LANES))
            totals[head] = jnp.full((rows, _LANES), 1.0 if sunk else 0.0, jnp.float32)
            mixed[head] = jnp.zeros((rows, dim), jnp.float32)

    @pl.when((bounds[row, 0] <= number) & (number < bounds[row, 1]))
    def _() -> None:
        seen = jnp.broadcast_to(masks[0, 0] != 0, (rows, masks.shape[3]))
        for head in range(heads):
            read = [_numbers(key[0, head], kind) for key in keys]
            mine = read[0] if joined else _numbers(values[0, head], kind)
            scores = _product(queries[0][0, head], read[0], 1)
            for query, key in zip(queries[1:], read[1:], strict=True):
                scores = scores + _product(query[0, head], key, 1)
            scores = scores * scale
            if softcap is not None:
                scores = softcap * jnp.tanh(scores / softcap)
            most = mosts[head][:, :1]
            higher = jnp.maximum(most, jnp.where(seen, scores, _LEAST).max(1, keepdims=True))
            weights = jnp.where(seen, jnp.exp(scores - higher), 0.0)
            shrink = jnp.exp(most - higher)
            total = totals[head][:, :1] * shrink + weights.sum(1, keepdims=True)
            added = _product(weights.astype(kind), mine, 0)
            mixed[head] = mixed[head] * shrink + added
            mosts[head] = jnp.broadcast_to(higher, (rows, _LANES))
            totals[head] = jnp.broadcast_to(total, (rows, _LANES))

    @pl.when(number == count - 1)
    def _() -> None:
        for head in range(heads):
            total = totals[head][:, :1]
            out[0, head] = (mixed[head] / jnp.where(total == 0, 1.0, total)).astype(out.dtype)


def _numbers(page: Array, kind: Any) -> Array:
    """Returns a page [page, D] of 8 bits as numbers of `kind`; others as they are."""
    if page.dtype == kind:
        return page
    if page.dtype != jnp.int8:
        return page.astype(jnp.float32).astype(kind)
    codes, size = page.astype(jnp.int32), page.shape[1] - _SCALE
    bits = jnp.zeros((page.shape[0], 1), jnp.int32)
    for byte in range(_SCALE):
        bits |= (codes[:, size + byte : size + byte + 1] & 255) << 8 * byte
    scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return (codes[:, :size].astype(jnp.float32) * scale).astype(kind)


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
