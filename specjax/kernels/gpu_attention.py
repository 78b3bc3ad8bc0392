"""Attention of few tokens as one kernel for an NVIDIA GPU, written with Pallas for Triton.

XLA:GPU makes three or more kernels a layer of it, and reads every slot of a cache.  This kernel
reads the slots from the first to the last one that a token of the row sees.

The result of a query does not depend on the other queries, so a token has the same attention in a
pass of one token and in the verification of a tree.  A program of the kernel multiplies always
`_ROWS` queries of one key head with blocks of slots of one size, in the order of the slots.  A
block that a query does not see changes none of its sums.

Keys and values may be in pages, which the kernel reads where they lie, by the row's table.
Otherwise it may also write the keys and values of the tokens into the cache, before it reads them.
Programs for other queries of the same key head write the same numbers.

One program a key head leaves most of a GPU idle.  So a cache of more than `_UNCUT` slots is read by
a program for each chunk of `_CHUNK`, and a second kernel adds the chunks, in their order.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

MOST_QUERIES = 63
"""The most tokens of a pass: `models.attention` reads the slots of more in blocks anyway."""

_ROWS = 16  # the fewest rows of a product of tensor cores
_BLOCK_BYTES = 2**14  # of keys: two blocks, loaded ahead, fit the memory of a core of every GPU
_MOST_SLOTS, _FEWEST_SLOTS = 128, 16  # of a block
_DIMS = (16, 32, 64, 128, 256, 512)  # Triton's arrays have powers of two
_DTYPES = ("bfloat16", "float16", "float32")
_UNCUT, _CHUNK = 2048, 1024  # slots
_LEAST = float(jnp.finfo(jnp.float32).min)


def takes_attention_on_gpu(query: Array, keys: Array, values: Array, paged: bool = False) -> bool:
    """Returns whether `few_queries_on_gpu` computes the attention of these queries.

    Args:
      paged: keys and values are pages [P, K, page, D].
    """
    _, width, heads, dim = query.shape
    return (
        0 < width <= MOST_QUERIES
        and dim in _DIMS
        and keys.shape == values.shape
        and keys.size > 0
        and heads % keys.shape[1] == 0
        and query.dtype == keys.dtype == values.dtype
        and keys.dtype.name in _DTYPES
        and dim * keys.dtype.itemsize * _FEWEST_SLOTS <= _BLOCK_BYTES
        and keys.shape[2] % _block(keys, paged) == 0
    )


def _block(keys: Array, paged: bool = False) -> int:
    """Returns the slots of a block, which follow from the size and the dtype of a key.

    A page may have fewer.
    """
    most = min(_MOST_SLOTS, _BLOCK_BYTES // (keys.shape[3] * keys.dtype.itemsize))
    return min(most, keys.shape[2]) if paged else most


def few_queries_on_gpu(
    query: Array,
    keys: Array,
    values: Array,
    visible: Array | None,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
    interpret: bool = False,
    table: Array | None = None,
    start: Array | None = None,
    whole: bool = False,
) -> Any:
    """Computes softmax attention in a program for one GPU.

    Args:
      query: [B, N, H, D], N at most `MOST_QUERIES`; with `start` [B, N, H + 2 K, D], where the keys
        and then the values of the tokens follow.
      keys, values: [B, K, S, D] of the query's dtype; H is a multiple of K.
      visible: [B or 1, N, S] bool.  Slots that a token does not see may have any finite contents.
        None, with `start` and `whole`: a token sees all slots up to its own.
      scale: of the scores.
      softcap: c of the scores c tanh(x / c), or None.
      sinks: [H], a score of each head with a value of 0, or None.
      interpret: compute what the kernel computes, on any platform, slowly.
      table: [B, T] int32, the numbers of each row's pages; then keys and values are pages
        [P, K, page, D], and S is T * page.
      start: [B] int32, the slot where the first token's keys and values are written, and those of
        the others behind it; not for pages.
      whole: with `start`, all slots before the first token's are seen by some token.

    Returns:
      [B, N, H * D] of the query's dtype; 0 for a token that sees no slot and has no sink.  With
      `start`, a tuple of this, and of keys and values with those of the tokens.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    batch, width, joined, dim = query.shape
    paged, writes = table is not None, start is not None
    key_heads = keys.shape[1]
    slots = keys.shape[2] if visible is None else visible.shape[2]
    heads = joined - 2 * key_heads * writes
    chunks = 1 if slots <= _UNCUT else -(-slots // _CHUNK)
    block = _block(keys, paged)
    page = keys.shape[2] if paged else None
    sizes = _Sizes(
        width, heads, heads // key_heads, dim, block, chunks, page, joined,
        writes, not interpret, writes and whole, visible is None,
    )  # fmt: skip
    if start is not None and whole:
        bounds = start.astype(jnp.int32)
    else:
        assert visible is not None
        # Which blocks a row reads is the same for all layers of a kind: XLA computes it once.
        seen = visible.any(1)
        first = jnp.argmax(seen, axis=1) // sizes.block
        last = -(-jnp.max(jnp.where(seen, jnp.arange(slots) + 1, 0), axis=1) // sizes.block)
        bounds = jnp.stack([first, last], axis=1).astype(jnp.int32)
    masks = None if visible is None else visible.astype(jnp.int8)

    def call(
        kernel: Any, programs: int, operands: list[Any], specs: list[Any], out: Any, places: Any
    ) -> Any:
        return pl.pallas_call(
            functools.partial(kernel, sizes),
            out_shape=jax.tree.map(lambda one: one[0], out, is_leaf=_is_pair),
            grid=(programs, key_heads, batch),
            in_specs=specs,
            out_specs=jax.tree.map(lambda one: one[1], out, is_leaf=_is_pair),
            compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
            interpret=interpret,
            input_output_aliases=places,
            name="few_queries",
        )(*operands)

    def shared(array: Array) -> Any:
        """Returns the block of an array of masks, which all rows of a batch may share."""
        one = len(array) == 1
        zeros = (0,) * (array.ndim - 1)
        return pl.BlockSpec(
            (None, *array.shape[1:]), lambda tile, head, row: (0 if one else row, *zeros)
        )

    def of_head(*shape: int) -> Any:
        return pl.BlockSpec(
            (None, None, *shape), lambda tile, head, row: (row, head, *(0 for _ in shape))
        )

    def flat(count: int) -> Any:
        return pl.BlockSpec((None, width * count, dim), lambda tile, head, row: (row, 0, 0))

    kept = of_head(slots, dim)
    if table is not None:
        pool = (len(keys), None, keys.shape[2], dim)
        kept = pl.BlockSpec(pool, lambda tile, head, row: (0, head, 0, 0))
    limits = pl.BlockSpec(bounds.shape, lambda *_: (0,) * bounds.ndim)
    operands = [query.reshape(batch, width * joined, dim), keys, values, bounds]
    specs = [flat(joined), kept, kept, limits]
    if masks is not None:
        operands.append(masks)
        specs.append(shared(masks))
    if table is not None:
        operands.append(table.astype(jnp.int32))
        specs.append(shared(table))
    written: list[Any] = []
    if start is not None:
        operands += [query, query, start.astype(jnp.int32)]
        for first in (heads, heads + key_heads):
            specs.append(
                pl.BlockSpec(
                    (None, width, None, dim),
                    lambda tile, head, row, first=first: (row, 0, first + head, 0),
                )
            )
        specs.append(pl.BlockSpec((batch,), lambda *_: (0,)))
        written = [(jax.ShapeDtypeStruct(x.shape, x.dtype), kept) for x in (keys, values)]
    given = [] if sinks is None else [sinks.astype(jnp.float32)]
    sunk = [pl.BlockSpec((heads,), lambda tile, head, row: (0,)) for _ in given]
    mixed = jax.ShapeDtypeStruct((batch, width * heads, dim), query.dtype), flat(heads)
    scoring = functools.partial(_scored, scale=scale, softcap=softcap)
    if sizes.chunks == 1:
        kernel = functools.partial(_whole, scoring)
        places = {1: 1, 2: 2} if written else {}
        out = [mixed, *written]
        made = call(kernel, sizes.tiles, operands + given, specs + sunk, out, places)
        return _shaped(made[0], batch, width, made[1:])
    rows = sizes.tiles * _ROWS
    parts = [
        (jax.ShapeDtypeStruct((batch, key_heads, *shape), jnp.float32), of_head(*shape))
        for shape in ((sizes.chunks, rows), (sizes.chunks, rows), (sizes.chunks, rows, dim))
    ]
    kernel = functools.partial(_of_chunk, scoring)
    places = {1: 3, 2: 4} if written else {}
    out = [*parts, *written]
    sums = call(kernel, sizes.tiles * sizes.chunks, operands, specs, out, places)
    specs = [*(spec for _, spec in parts), limits, *sunk]
    operands = [*sums[:3], bounds, *given]
    (made,) = call(_joined, sizes.tiles, operands, specs, [mixed], {})
    return _shaped(made, batch, width, sums[3:])


def _shaped(mixed: Array, batch: int, width: int, written: Any) -> Any:
    made = mixed.reshape(batch, width, -1)
    return (made, *written) if written else made


_Sums = tuple[Array, Array, Array]
"""Of queries [R]: the greatest score [R], the sum of the weights [R], and the mixed values [R, D].
"""


@dataclasses.dataclass(frozen=True)
class _Sizes:
    width: int  # tokens
    heads: int
    groups: int  # heads of a key head
    dim: int
    block: int  # slots
    chunks: int
    page: int | None  # slots
    stride: int  # from the first head of a token to that of the next one
    writes: bool = False  # the tokens' keys and values
    fenced: bool = True  # a barrier stands behind what is written
    from_start: bool = False  # the bounds are the slots of the first tokens
    causal: bool = False  # a token sees all slots up to its own

    @property
    def tiles(self) -> int:
        """The number of programs for the queries of a key head."""
        return -(-self.width * self.groups // _ROWS)

    def limits(self, bounds: Any) -> tuple[Array, Array]:
        """Returns the first block that the program's row reads, and the one behind the last."""
        from jax.experimental import pallas as pl

        row = pl.program_id(2) if bounds.shape[0] > 1 else 0  # all rows may share the masks
        if not self.from_start:
            return bounds[row, 0], bounds[row, 1]
        return jnp.int32(0), (bounds[row] + self.width + self.block - 1) // self.block

    def queries(self, tile: Array) -> tuple[Array, Array]:
        """Returns the tokens and the heads of the queries of a program.

        Behind the last query it is computed again, and stored again with equal bits.
        """
        from jax.experimental import pallas as pl

        number = jnp.minimum(tile * _ROWS + jnp.arange(_ROWS), self.width * self.groups - 1)
        return number // self.groups, pl.program_id(1) * self.groups + number % self.groups

    def numbers(self, rows: Array) -> tuple[Array, Array]:
        """Returns the indices of all numbers of rows."""
        shape = len(rows), self.dim
        return (
            jnp.broadcast_to(rows[:, None], shape),
            jnp.broadcast_to(jnp.arange(self.dim)[None], shape),
        )


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple)


def _whole(scoring: Any, sizes: _Sizes, query: Any, *others: Any) -> None:
    """Computes `_ROWS` queries of a key head; the arguments are references to a row's arrays."""
    from jax.experimental import pallas as pl

    arrays, bounds, sinks, (out, *_) = _opened(sizes, query, others, 1, 0, None)
    token, head = sizes.queries(pl.program_id(0))
    begun = _begun(sizes, head, sinks)
    sums = _added(scoring, sizes, arrays, token, head, *sizes.limits(bounds), begun)
    _store(sizes, out, token, head, sums)


def _of_chunk(scoring: Any, sizes: _Sizes, query: Any, *others: Any) -> None:
    """Computes the sums of `_ROWS` queries over the slots of a chunk."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    tile, chunk = pl.program_id(0) % sizes.tiles, pl.program_id(0) // sizes.tiles
    arrays, bounds, _, out = _opened(sizes, query, others, 3, chunk * _CHUNK, _CHUNK)
    most, total, mixed = out[:3]
    token, head = sizes.queries(tile)
    blocks = _CHUNK // sizes.block
    first, last = sizes.limits(bounds)
    first = jnp.maximum(first, chunk * blocks)
    last = jnp.minimum(last, (chunk + 1) * blocks)
    begun = _begun(sizes, head, [])
    sums = _added(scoring, sizes, arrays, token, head, first, last, begun)
    row = tile * _ROWS + jnp.arange(_ROWS)
    here = jnp.full(_ROWS, chunk)
    triton.store(most.at[here, row], sums[0])
    triton.store(total.at[here, row], sums[1])
    rows, numbers = sizes.numbers(row)
    triton.store(mixed.at[jnp.full(rows.shape, chunk), rows, numbers], sums[2])


def _opened(
    sizes: _Sizes, query: Any, others: Any, results: int, first: Array | int, slots: int | None
) -> tuple[tuple[Any, ...], Any, list[Any], list[Any]]:
    """Writes the tokens' keys and values into the slots from `first` on, and sorts references.

    Returns:
      What `_added` reads, the bounds, the sinks, and where the results are stored.
    """
    keys, values, bounds, *rest = others
    visible = None if sizes.causal else rest.pop(0)
    count = results + 2 * sizes.writes
    out, rest = rest[-count:], rest[:-count]
    table = None if sizes.page is None else rest.pop(0)
    if sizes.writes:
        *made, start = (rest.pop(0) for _ in range(3))
        keys, values = out[results:]
        for kept, new in zip((keys, values), made, strict=True):
            _write(sizes, kept, new, start, first, slots)
        if sizes.fenced:
            from jax.experimental.pallas import triton

            triton.debug_barrier()  # the other threads of this program read what is written
    return (query, keys, values, visible, table, bounds), bounds, rest, out


def _write(
    sizes: _Sizes, kept: Any, new: Any, start: Any, first: Array | int, slots: int | None
) -> None:
    """Writes the tokens whose slots are among the `slots` (None: all) from `first` on."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    shape = 1 << (sizes.width - 1).bit_length(), sizes.dim  # Triton's arrays have powers of two
    token = jnp.broadcast_to(jnp.arange(shape[0])[:, None], shape)
    number = jnp.broadcast_to(jnp.arange(shape[1])[None], shape)
    slot = start[pl.program_id(2)] + token
    here = token < sizes.width
    if slots is not None:
        here &= (slot >= first) & (slot < first + slots)
    x = triton.load(new.at[token, number], mask=here, other=0.0)
    triton.store(kept.at[slot, number], x.astype(kept.dtype), mask=here)


def _joined(sizes: _Sizes, *references: Any) -> None:
    """Adds the sums of the chunks that the row sees."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    mosts, totals, values, bounds, *sinks, out = references
    token, head = sizes.queries(pl.program_id(0))
    row = pl.program_id(0) * _ROWS + jnp.arange(_ROWS)
    rows, numbers = sizes.numbers(row)

    def step(chunk: Array, sums: _Sums) -> _Sums:
        here = jnp.full(_ROWS, chunk)
        most, total = (triton.load(x.at[here, row]) for x in (mosts, totals))
        mixed = triton.load(values.at[jnp.full(rows.shape, chunk), rows, numbers])
        higher = jnp.maximum(sums[0], most)
        before, now = jnp.exp(sums[0] - higher), jnp.exp(most - higher)
        added = sums[2] * before[:, None] + mixed * now[:, None]
        return higher, sums[1] * before + total * now, added

    blocks = _CHUNK // sizes.block
    first, last = sizes.limits(bounds)
    last = (last + blocks - 1) // blocks
    sums = jax.lax.fori_loop(first // blocks, last, step, _begun(sizes, head, sinks))
    _store(sizes, out, token, head, sums)


def _begun(sizes: _Sizes, head: Array, sinks: list[Any]) -> _Sums:
    """Returns the sums over no slots; a sink is a slot with a value of 0."""
    from jax.experimental.pallas import triton

    if sinks:
        most, total = triton.load(sinks[0].at[head]), jnp.ones(_ROWS, jnp.float32)
    else:
        most, total = jnp.full(_ROWS, _LEAST, jnp.float32), jnp.zeros(_ROWS, jnp.float32)
    return most, total, jnp.zeros((_ROWS, sizes.dim), jnp.float32)


def _added(
    scoring: Any,
    sizes: _Sizes,
    arrays: tuple[Any, ...],
    token: Array,
    head: Array,
    first: Array,
    last: Array,
    begun: _Sums,
) -> _Sums:
    """Adds the blocks `first` ... `last` - 1 of the slots to the sums of queries."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    query, keys, values, visible, table, bounds = arrays
    asked = triton.load(query.at[sizes.numbers(token * sizes.stride + head)])
    shape = _ROWS, sizes.block
    tokens = jnp.broadcast_to(token[:, None], shape)

    own = bounds[pl.program_id(2)] if sizes.causal else 0  # the slot of the first token

    def block(kept: Any, start: Array) -> Array:
        if sizes.page is None:
            return kept[pl.ds(start, sizes.block), :]
        assert table is not None
        number = triton.load(table.at[start // sizes.page])
        return kept[number, pl.ds(start % sizes.page, sizes.block), :]

    def step(number: Array, sums: _Sums) -> _Sums:
        most, total, mixed = sums
        start = number * sizes.block
        slots = jnp.broadcast_to(start + jnp.arange(sizes.block)[None], shape)
        if sizes.causal:
            seen = slots <= own + tokens
        else:
            seen = triton.load(visible.at[tokens, slots]) != 0
        scores = scoring(_product(asked, block(keys, start), 1))
        higher = jnp.maximum(most, jnp.where(seen, scores, _LEAST).max(1))
        weights = jnp.where(seen, jnp.exp(scores - higher[:, None]), 0.0)
        shrink = jnp.exp(most - higher)
        added = _product(weights.astype(asked.dtype), block(values, start), 0)
        return higher, total * shrink + weights.sum(1), mixed * shrink[:, None] + added

    return jax.lax.fori_loop(first, last, step, begun)


def _product(x: Array, y: Array, summed: int) -> Array:
    """Multiplies two matrices; by default those of float32 would be of TensorFloat-32."""
    return jax.lax.dot_general(
        x,
        y,
        (((1,), (summed,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _scored(products: Array, scale: float, softcap: float | None) -> Array:
    scores = products * scale
    if softcap is None:
        return scores
    # tanh itself is a call of NVIDIA's library, which needs a file of the CUDA toolkit.
    return softcap * (1 - 2 / (jnp.exp(scores * (2 / softcap)) + 1))


def _store(sizes: _Sizes, out: Any, token: Array, head: Array, sums: _Sums) -> None:
    from jax.experimental.pallas import triton

    _, total, mixed = sums
    mixed = mixed / jnp.where(total == 0, 1.0, total)[:, None]
    triton.store(out.at[sizes.numbers(token * sizes.heads + head)], mixed.astype(out.dtype))
