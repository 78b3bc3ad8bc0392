"""Attention of few tokens over pages on a CPU, and the writing of pages and slots."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from specjax.kernels import available
from specjax.kernels.queries import fits

_WRITTEN = ("float32", "bfloat16", "float16")


def takes_pages(query: Array, pages: Array, softcap: float | None) -> bool:
    """Returns whether `few_queries_of_pages` computes the attention of these queries."""
    return fits(query, pages) and _attention(pages, softcap) is not None


def few_queries_of_pages(
    query: Array,
    keys: Array,
    values: Array,
    table: Array,
    visible: Array,
    scale: float,
    softcap: float | None,
) -> Array:
    """Computes `few_queries` where keys and values are in pages, which are read where they lie.

    The bits are those of `few_queries` with the pages of each row joined.

    Args:
      query: [B, N, H, D] of any dtype, N at most `MOST_TOKENS`.
      keys, values: [P, K, page, D], both float32 or both bfloat16; H is a multiple of K.
      table: [B, T] int32, the numbers of each row's pages.
      visible: [B or 1, N, T * page] bool.  Slots that a token does not see may have any contents.
      scale: of the scores.
      softcap: c of the scores c tanh(x / c), or None.

    Returns:
      [B, N, H, D] float32; 0 for a token that sees no slot.
    """
    target = _attention(keys, softcap)
    if target is None:
        raise ValueError(f"no kernel for {keys.dtype.name} on this CPU; ask `takes_pages` first")
    numbers = jnp.asarray([scale, softcap or 0.0], jnp.float32)
    shape = jax.ShapeDtypeStruct(query.shape, jnp.float32)
    call = jax.ffi.ffi_call(target, shape, vmap_method="sequential")
    return call(query.astype(jnp.float32), keys, values, visible, numbers, table)


def writes_pages(pages: Array) -> bool:
    """Returns whether `write_pages` writes pages of this dtype."""
    return pages.dtype.name in _WRITTEN and _writing(pages) is not None


def write_pages(pages: Array, new: Array, table: Array, start: Array) -> Array:
    """Writes the tokens `new` [B, K, N, D] into pages [P, K, page, D], in a program for one CPU.

    Args:
      pages: the page 0 is never written.
      new: of the dtype of the pages.
      table: [B, T] int32, the numbers of each row's pages; what belongs to a page 0 is dropped.
      start: [B] int32, the slot of the row's first new token.
    """
    target = _writing(pages)
    if target is None:
        raise ValueError(f"no kernel for {pages.dtype.name} on this CPU; ask `writes_pages` first")
    shape = jax.ShapeDtypeStruct(pages.shape, pages.dtype)
    call = jax.ffi.ffi_call(target, shape, input_output_aliases={3: 0})
    return call(new, table, start, pages)


def writes_slots(slots: Array) -> bool:
    """Returns whether `write_slots` writes slots of this dtype."""
    name = slots.dtype.name
    return name in _WRITTEN and available.made("writing_slots", name) is not None


def write_slots(slots: Array, new: Array, start: Array) -> Array:
    """Writes the tokens `new` [B, K, N, D] into slots [B, K, S, D], in a program for one CPU.

    Args:
      slots: of which those from start[b] are written.
      new: of the dtype of the slots.
      start: [B] int32, the slot of the row's first new token.
    """
    target = available.made("writing_slots", slots.dtype.name)
    if target is None:
        raise ValueError(f"no kernel for {slots.dtype.name} on this CPU; ask `writes_slots` first")
    shape = jax.ShapeDtypeStruct(slots.shape, slots.dtype)
    call = jax.ffi.ffi_call(target, shape, input_output_aliases={2: 0}, vmap_method="sequential")
    return call(new, start.astype(jnp.int32), slots)


def _attention(pages: Array, softcap: float | None) -> str | None:
    page, dim = pages.shape[2:]
    return available.made("attention", pages.dtype.name, dim, softcap is not None, page)


def _writing(pages: Array) -> str | None:
    return available.made("writing", pages.dtype.name, pages.shape[2])
