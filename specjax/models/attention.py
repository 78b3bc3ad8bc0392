"""Grouped-query attention with any mask, and causal attention; long inputs are done in blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax import kernels
from specjax._internal.platforms import (
    Device,
    by_platform,
    on_cpu,
    on_cuda,
    on_tpu,
    runs_triton,
)
from specjax.caches import KVCache, Memory, Pages, as_read, is_rounded, read_size
from specjax.models.products import float32_dot_general

_CAUSAL_BLOCK = 64
BLOCK_SLOTS = 512
"""Slots of a cache that a pass reads at a time, where it reads only the filled slots."""

_WIDE = 64  # passes of at least this many tokens read the slots in blocks on every platform
_NARROW = {"cpu": (1024, 256), "tpu": (2048, BLOCK_SLOTS)}
"""Platform -> the fewest slots that any pass reads in blocks there, and the slots of a block.

XLA:CPU copies a block before it multiplies.  So, where no kernel of our own attends, a single row
takes up to twice as long as without blocks if all slots are filled, but a seventh of the time if
100 of 4096 are.
"""


Parts = Array | Pages | tuple[Array, ...]
"""Queries or keys, or several parts of them: the scores of the parts are summed."""

_Mixing = Callable[[Parts, Parts, Any, Array, Array | None], Array]
"""Maps queries [B, K, R, D], keys, values, `visible` and sinks [K, R, 1] to [B, K, R, V] float32.
"""


def attend(
    query: Parts,
    keys: Parts,
    values: Array | Pages,
    visible: Array,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """Computes softmax attention with an explicit mask.

    Keys and values in pages are read in blocks of slots, and by a kernel on one TPU.

    Args:
      query: [B, N, H, D]; H is a multiple of K.  It may be parts of several sizes D.
      keys: [B, K, S, D], or as many parts as `query` has, so that no copy of a cache joins them.
      values: [B, K, S, V].
      visible: [B or 1, N, S] bool; every token attends to at least one slot.
      scale: of the scores, by default D ** -0.5.
      softcap: bounds the scores by c tanh(x / c) (Gemma 2, arXiv 2408.00118, section 2).
      sinks: [H], a score of each head that joins the softmax, with a value of 0 (Xiao et al. 2023,
        arXiv 2309.17453; learned in gpt-oss).

    Returns:
      [B, N, H * V].  Scores and their softmax are float32 whatever the inputs are.
    """
    queries = jax.tree.leaves(query)
    width, slots = queries[0].shape[1], values.shape[2]
    factor = sum(part.shape[3] for part in queries) ** -0.5 if scale is None else scale

    def blocks(size: int) -> _Mixing:
        return functools.partial(_in_blocks, size, factor, softcap)

    whole = functools.partial(_whole, factor, softcap)
    narrow = {name: blocks(size) for name, (least, size) in _NARROW.items() if slots >= least}
    if isinstance(values, Pages):
        page = values.page
        mix = blocks(min(slots, max(BLOCK_SLOTS // page, 1) * page))
        if not values.split and all(map(_is_pages, _parts(keys))):
            # The values of latent attention are its first keys, and are read once for both.
            joined = values is _parts(keys)[0]
            pools = tuple(part.pool for part in _parts(keys))
            if kernels.takes_pages_on_tpu(tuple(queries), pools, None if joined else values.pool):
                other = functools.partial(_by_group, mix)
                of_pages = functools.partial(_of_pages_on_tpu, factor, softcap, joined)
                return on_tpu(of_pages, other, query, keys, values, visible, sinks)
    elif width >= _WIDE and slots > BLOCK_SLOTS:
        mix = blocks(BLOCK_SLOTS)
    elif narrow:
        mix = functools.partial(by_platform, narrow, whole)
    else:
        mix = whole
    return _by_group(mix, query, keys, values, visible, sinks)


def _of_pages_on_tpu(
    scale: float,
    softcap: float | None,
    joined: bool,
    query: Any,
    keys: Any,
    values: Any,
    visible: Array,
    sinks: Array | None,
) -> Array:
    pools = tuple(part.pool for part in _parts(keys))
    return kernels.few_queries_of_pages_on_tpu(
        _parts(query), pools, None if joined else values.pool, values.table, visible, scale,
        softcap, sinks,
    )  # fmt: skip


def _parts(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


@functools.partial(jax.custom_jvp, nondiff_argnums=(4, 5))
def cpu_attend(
    query: Array,
    keys: Array | Pages,
    values: Array | Pages,
    visible: Array,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """Computes `attend` for arrays on one device, with `specjax.kernels` for few tokens.

    On a mesh XLA would gather the cache, so models on several devices take `attend`.  The kernels
    have no sinks.
    """
    other = functools.partial(attend, scale=scale, softcap=softcap, sinks=sinks)
    paged = isinstance(keys, Pages)
    if (
        sinks is not None
        or keys.dtype != values.dtype
        or keys.shape != values.shape
        or not (
            kernels.takes_pages(query, keys.pool, softcap)
            if paged
            else kernels.takes_attention(query, keys, softcap)
        )
    ):
        return other(query, keys, values, visible)
    factor = query.shape[3] ** -0.5 if scale is None else scale

    def few(query: Array, keys: Any, values: Any, visible: Array) -> Array:
        if paged:
            mixed = kernels.few_queries_of_pages(
                query, keys.pool, values.pool, keys.table, visible, factor, softcap
            )
        else:
            mixed = kernels.few_queries(query, keys, values, visible, factor, softcap)
        return mixed.astype(values.dtype).reshape(*query.shape[:2], -1)

    return on_cpu(few, other, query, keys, values, visible)


@functools.partial(jax.custom_jvp, nondiff_argnums=(4, 5))
def gpu_attend(
    query: Array,
    keys: Array | Pages,
    values: Array | Pages,
    visible: Array,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """Computes `attend` for arrays on one GPU, with `specjax.kernels` for few tokens.

    On a mesh XLA would gather the cache, so models on several devices take `attend`.
    """
    other = functools.partial(attend, scale=scale, softcap=softcap, sinks=sinks)
    paged = isinstance(keys, Pages)
    held_keys, held_values = (x.pool if isinstance(x, Pages) else x for x in (keys, values))
    if not kernels.takes_attention_on_gpu(query, held_keys, held_values, paged):
        return other(query, keys, values, visible)
    factor = query.shape[3] ** -0.5 if scale is None else scale
    of_slots = functools.partial(
        kernels.few_queries_on_gpu, scale=factor, softcap=softcap, sinks=sinks
    )

    def of_pages(query: Array, keys: Any, values: Any, visible: Array) -> Array:
        return of_slots(query, keys.pool, values.pool, visible, table=keys.table)

    return on_cuda(of_pages if paged else of_slots, other, query, keys, values, visible)


def gpu_stage_and_attend(
    query: Array,
    new_keys: Array,
    new_values: Array,
    memory: Memory,
    visible: Array | None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    window: int | None = None,
) -> tuple[Array, tuple[Array, Array]]:
    """Stages the tokens' keys and values [B, N, K, D], and computes `gpu_attend`.

    For few tokens on an NVIDIA GPU one kernel does both.

    Args:
      visible: as for `attend`; None: a token sees what is committed, the tokens before it, and
        itself; only for a `KVCache`.
      window: None: a token sees all that is committed.

    Returns:
      The outputs of `gpu_attend`, and all keys and values, as `Memory.stage` returns them.
    """
    joins = (
        type(memory) is KVCache
        and memory.sharding is None
        and query.dtype == new_keys.dtype == new_values.dtype
        and kernels.takes_attention_on_gpu(query, memory.keys[0], memory.values[0])
    )
    of_arrays = memory, query, new_keys, new_values, visible, sinks
    if joins:
        return _stage_and_attend(*of_arrays, scale, softcap, window)
    return _stage_then_attend(*of_arrays, scale, softcap)


def _stage_then_attend(
    memory: Any,
    query: Array,
    new_keys: Array,
    new_values: Array,
    visible: Array | None,
    sinks: Array | None,
    scale: float | None,
    softcap: float | None,
) -> tuple[Array, tuple[Array, Array]]:
    if visible is None:
        visible = memory.visible(memory.next_positions(query.shape[1]))
    keys, values = memory.stage(new_keys.swapaxes(1, 2), new_values.swapaxes(1, 2))
    return gpu_attend(query, keys, values, visible, scale, softcap, sinks), (keys, values)


@functools.partial(jax.custom_jvp, nondiff_argnums=(6, 7, 8))
def _stage_and_attend(
    memory: KVCache,
    query: Array,
    new_keys: Array,
    new_values: Array,
    visible: Array | None,
    sinks: Array | None,
    scale: float | None,
    softcap: float | None,
    window: int | None,
) -> tuple[Array, tuple[Array, Array]]:
    factor = query.shape[3] ** -0.5 if scale is None else scale

    def joined(memory: Any, *arrays: Any) -> tuple[Array, tuple[Array, Array]]:
        query, new_keys, new_values, visible, sinks = arrays
        together = jnp.concatenate([query, new_keys, new_values], axis=2)  # by one kernel
        mixed, keys, values = kernels.few_queries_on_gpu(
            together, memory.keys[0], memory.values[0], visible, factor, softcap, sinks,
            start=memory.length, whole=window is None,
        )  # fmt: skip
        return mixed, (keys, values)

    apart: Callable[..., Any] = functools.partial(_stage_then_attend, scale=scale, softcap=softcap)
    return on_cuda(joined, apart, memory, query, new_keys, new_values, visible, sinks)


@_stage_and_attend.defjvp
def _(
    scale: float | None,
    softcap: float | None,
    window: int | None,
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
) -> Any:
    del window
    apart = functools.partial(_stage_then_attend, scale=scale, softcap=softcap)
    return jax.jvp(apart, primals, tangents)


def _jvp(
    scale: float | None,
    softcap: float | None,
    primals: tuple[Array, ...],
    tangents: tuple[Array, ...],
) -> tuple[Array, Array]:
    def plain(
        query: Array, keys: Array, values: Array, visible: Array, sinks: Array | None
    ) -> Array:
        return attend(query, keys, values, visible, scale, softcap, sinks)

    return jax.jvp(plain, primals, tangents)


cpu_attend.defjvp(_jvp)
gpu_attend.defjvp(_jvp)


def attend_on(device: Device | None) -> Callable[..., Array]:
    """Returns the form of `attend` for a model on one device; None: it is on several."""
    if device is not None and device.platform == "cpu":
        return cpu_attend
    return gpu_attend if device is not None and runs_triton(device) else attend


def _by_group(
    mix: _Mixing,
    query: Parts,
    keys: Parts,
    values: Array | Pages,
    visible: Array,
    sinks: Array | None = None,
) -> Array:
    """Runs `mix` with the query heads grouped by key head; the shapes are those of `attend`."""
    batch, width, heads, _ = jax.tree.leaves(query)[0].shape
    key_heads, dim = values.shape[1], read_size(values.shape[3], values.dtype)
    groups = heads // key_heads

    def grouped(part: Array) -> Array:
        split = part.reshape(batch, width, key_heads, groups, -1).transpose(0, 2, 3, 1, 4)
        return split.reshape(batch, key_heads, groups * width, -1)

    if sinks is not None:
        sinks = jnp.repeat(sinks.astype(jnp.float32), width).reshape(key_heads, -1, 1)
    out = mix(jax.tree.map(grouped, query), keys, values, visible, sinks)
    kind = jax.tree.leaves(query)[0].dtype if is_rounded(values.dtype) else values.dtype
    out = out.astype(kind).reshape(batch, key_heads, groups, width, dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, width, heads * dim)


def _whole(
    scale: float,
    softcap: float | None,
    grouped: Parts,
    keys: Parts,
    values: Array,
    visible: Array,
    sinks: Array | None = None,
) -> Array:
    """Attends to all slots at once."""
    kind = jax.tree.leaves(grouped)[0].dtype
    keys, values = jax.tree.map(lambda x: as_read(x, kind), (keys, values))
    scores = _scores(grouped, keys, visible, scale, softcap)
    if sinks is None:
        return _mix(jax.nn.softmax(scores, axis=-1), values)
    most = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), sinks))
    weights = jnp.exp(scores - most)
    return _mix(weights / (weights.sum(-1, keepdims=True) + jnp.exp(sinks - most)), values)


def _scores(
    grouped: Parts, keys: Parts, visible: Array, scale: float, softcap: float | None
) -> Array:
    """Returns [B, K, R, S] float32 for queries [B, K, R, D]; R is (heads per key head) times N."""
    slots = visible.shape[2]
    products = (
        float32_dot_general(part, key, (((3,), (3,)), ((0, 1), (0, 1))))
        for part, key in zip(jax.tree.leaves(grouped), jax.tree.leaves(keys), strict=True)
    )
    scores = functools.reduce(jnp.add, products) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    by_head = scores.reshape(*scores.shape[:2], -1, visible.shape[1], slots)
    # Masked scores become a finite number, so that an infinite one cannot turn into NaN later.
    return jnp.where(visible[:, None, None], by_head, jnp.finfo(jnp.float32).min).reshape(
        scores.shape
    )


def _mix(weights: Array, values: Array) -> Array:
    """Multiplies [B, K, R, S] by [B, K, S, D], in float32."""
    weights = weights.astype(values.dtype)
    return float32_dot_general(weights, values, (((3,), (2,)), ((0, 1), (0, 1))))


def _is_pages(x: object) -> bool:
    return isinstance(x, Pages)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _in_blocks(
    size: int,
    scale: float,
    softcap: float | None,
    grouped: Parts,
    keys: Parts,
    values: Array,
    visible: Array,
    sinks: Array | None = None,
) -> Array:
    """Computes `_whole` over `size` slots at a time, with an online softmax.

    It covers the slots from the first to the last one that any token attends to.  So a chunk of a
    long prompt skips the slots that are still empty, and only the scores of one block are in
    memory.  Its gradient is that of `_whole`, since JAX cannot differentiate a loop whose length
    depends on data.

    Reference: Milakov and Gimelshein 2018, arXiv 1805.02867, algorithm 3.
    """
    kind, dim = jax.tree.leaves(grouped)[0].dtype, read_size(values.shape[3], values.dtype)
    shape = (*jax.tree.leaves(grouped)[0].shape[:3], 1)
    slot = jnp.arange(values.shape[2])
    seen = visible.any((0, 1))
    first = jnp.argmax(seen) // size
    last = -(-jnp.max(jnp.where(seen, slot + 1, 0)) // size)

    def step(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        most, total, mixed = carry
        # The last block is moved back to fit, so it overlaps the block before it.
        start = jnp.minimum(number * size, len(slot) - size)

        def cut(x: Any) -> Array:
            if isinstance(x, Pages):
                part = x.part(start, size)
            else:
                part = jax.lax.dynamic_slice_in_dim(x, start, size, 2)
            return as_read(part, kind)

        scores = _scores(
            grouped,
            jax.tree.map(cut, keys, is_leaf=_is_pages),
            cut(visible & (slot >= number * size)),
            scale,
            softcap,
        )
        higher = jnp.maximum(most, scores.max(-1, keepdims=True))
        # If a token had no visible slot so far, its sums hold only masked slots.  `shrink` sets
        # them to 0 at the first visible one.
        weights, shrink = jnp.exp(scores - higher), jnp.exp(most - higher)
        return (
            higher,
            total * shrink + weights.sum(-1, keepdims=True),
            mixed * shrink + _mix(weights, cut(values)),
        )

    if sinks is None:
        least, nothing = jnp.full(shape, jnp.finfo(jnp.float32).min), jnp.zeros(shape)
    else:  # as if they were slots before the first, with values of 0
        least, nothing = jnp.broadcast_to(sinks, shape), jnp.ones(shape)
    begun = (least, nothing, jnp.zeros((*shape[:3], dim)))
    with jax.named_scope("blocks"):
        _, total, mixed = jax.lax.fori_loop(first, last, step, begun)
    return mixed / total


def _forward(
    size: int, scale: float, softcap: float | None, *inputs: Any
) -> tuple[Array, tuple[Any, ...]]:
    return _in_blocks(size, scale, softcap, *inputs), inputs


def _backward(
    size: int, scale: float, softcap: float | None, inputs: tuple[Any, ...], out: Array
) -> tuple[Any, ...]:
    grouped, keys, values, visible, sinks = inputs

    def whole(grouped: Parts, keys: Parts, values: Array, sinks: Array | None) -> Array:
        return _whole(scale, softcap, grouped, keys, values, visible, sinks)

    slopes = jax.vjp(whole, grouped, keys, values, sinks)[1](out)
    return *slopes[:3], None, slopes[3]


_in_blocks.defvjp(_forward, _backward)


def causal_attend(
    query: Array,
    keys: Array,
    values: Array,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Array | None = None,
) -> Array:
    """Computes `attend` where token n attends to tokens 0 ... n, or to the last `window` of them.

    It takes one block of queries at a time, with only those keys that one of them attends to.  That
    skips nearly half of the scores of a long text and keeps the rest in a CPU's cache (a training
    step of 256 tokens on two cores is 1.17 times as fast).
    """
    length = query.shape[1]
    factor = query.shape[3] ** -0.5 if scale is None else scale
    mix = functools.partial(_whole, factor, softcap)
    parts = []
    for start in range(0, length, _CAUSAL_BLOCK):
        stop = min(start + _CAUSAL_BLOCK, length)
        first = 0 if window is None else max(0, start - window + 1)
        distance = jnp.arange(start, stop)[:, None] - jnp.arange(first, stop)
        visible = (distance >= 0) & (distance < (window or length))
        seen = slice(first, stop)
        parts.append(
            _by_group(
                mix,
                query[:, start:stop],
                keys[:, :, seen],
                values[:, :, seen],
                visible[None],
                sinks,
            )
        )
    return jnp.concatenate(parts, axis=1)
