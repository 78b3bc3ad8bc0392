"""The kernel for attention of few tokens on a GPU, computed on this machine: numbers, bits, what it
reads, and where it is taken."""

from __future__ import annotations

import contextlib
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_kernels import drawn, mask

from specjax import kernels
from specjax.caches import stage, visible_slots
from specjax.files.checkpoint import _usual_dtype
from specjax.kernels import gpu_attention
from specjax.models import attend, attend_on, cpu_attend, gpu_attend

pytestmark = pytest.mark.xdist_group("gpu attention")  # a share takes all of them, or none

SHAPE = (2, 5, 6, 2, 16, 256)  # rows, tokens, heads, key heads, numbers of a head, slots
SCALE = SHAPE[4] ** -0.5


@functools.cache
def kernel(softcap: float | None, chunk: int):
    """A program for each shape; the size of a chunk is read while it is traced."""
    few = functools.partial(
        kernels.few_queries_on_gpu, scale=SCALE, softcap=softcap, interpret=True
    )
    return jax.jit(lambda *inputs: few(*inputs[:4], sinks=inputs[4]))


@pytest.mark.parametrize(
    ("kind", "softcap", "sinks", "chunk"),
    [
        ("tree", None, None, 1024),
        ("window", 1.5, np.linspace(-1, 3, SHAPE[2]), 1024),
        ("any", None, np.linspace(-1, 3, SHAPE[2]), 128),
    ],
)
def test_numbers_bits_and_slots(kind, softcap, sinks, chunk, monkeypatch):
    """The numbers are those of `attend`; a token alone has the same bits; and slots that no token
    of a row sees are not read, but for the rest of a block."""
    monkeypatch.setattr(gpu_attention, "_CHUNK", chunk)
    monkeypatch.setattr(gpu_attention, "_UNCUT", chunk)
    query, keys, values = map(jnp.asarray, drawn(SHAPE, "float32"))
    seen = jnp.asarray(mask(kind, SHAPE[0], SHAPE[1], SHAPE[5]))
    seen = seen.at[1, :, 128:].set(False).at[1, :, 7].set(True)
    sinks = None if sinks is None else jnp.asarray(sinks, jnp.float32)
    wanted = attend(query, keys, values, seen, None, softcap, sinks)
    made = kernel(softcap, chunk)(query, keys, values, seen, sinks)
    np.testing.assert_allclose(np.asarray(made), np.asarray(wanted), rtol=0, atol=3e-6)
    keys, values = (x.at[1, :, 128:].set(jnp.nan) for x in (keys, values))
    for n in (0, 4):
        alone = kernel(softcap, chunk)(query[:, n : n + 1], keys, values, seen[:, n : n + 1], sinks)
        np.testing.assert_array_equal(np.asarray(alone)[:, 0], np.asarray(made)[:, n])


@pytest.mark.parametrize(("page", "chunk"), [(64, 1024), (16, 128)])
def test_pages_are_read_where_they_lie(page, chunk, monkeypatch):
    """The bits of joined pages, in blocks of one size; other rows' pages are not read."""
    monkeypatch.setattr(gpu_attention, "_CHUNK", chunk)
    monkeypatch.setattr(gpu_attention, "_UNCUT", chunk)
    monkeypatch.setattr(gpu_attention, "_MOST_SLOTS", page)
    query, keys, values = map(jnp.asarray, drawn(SHAPE, "float32"))
    seen = jnp.asarray(mask("tree", SHAPE[0], SHAPE[1], SHAPE[5]))
    few = functools.partial(kernels.few_queries_on_gpu, scale=SCALE, interpret=True)
    wanted = jax.jit(few)(query, keys, values, seen)
    rows, _, _, key_heads, dim, slots = SHAPE
    count = slots // page
    table = np.random.default_rng(0).permutation(np.arange(1, rows * count + 1))

    def pages(x: jax.Array) -> jax.Array:
        cut = x.reshape(rows, key_heads, count, page, dim).swapaxes(1, 2)
        pool = jnp.full((rows * count + 9, key_heads, page, dim), jnp.nan)
        return pool.at[table].set(cut.reshape(-1, key_heads, page, dim))

    numbers = jnp.asarray(table.reshape(rows, count), jnp.int32)
    made = jax.jit(few)(query, pages(keys), pages(values), seen, table=numbers)
    np.testing.assert_array_equal(np.asarray(made), np.asarray(wanted))


@pytest.mark.parametrize("kind", ["causal", "tree", "window"])
@pytest.mark.parametrize(("chunk", "dtype"), [(1024, "bfloat16"), (128, "float32")])
def test_tokens_are_written_before_they_are_read(kind, chunk, dtype, monkeypatch):
    """The bits are those of the kernel over a cache in which the tokens are staged, and so is the
    cache; also where the tokens are in two chunks."""
    monkeypatch.setattr(gpu_attention, "_CHUNK", chunk)
    monkeypatch.setattr(gpu_attention, "_UNCUT", chunk)
    rows, width, _, key_heads, dim, slots = SHAPE
    query, keys, values = (jnp.asarray(x, dtype) for x in drawn(SHAPE, "float32"))
    new = np.random.default_rng(1).standard_normal((2, rows, width, key_heads, dim), np.float32)
    new_keys, new_values = jnp.asarray(new, dtype)
    start = jnp.array([126, slots - width], jnp.int32)
    staged = [
        stage(old, x.swapaxes(1, 2), start) for old, x in ((keys, new_keys), (values, new_values))
    ]
    tree = np.tril(np.ones((width, width), bool))
    tree[3, 1:3] = False
    seen = visible_slots(start, width, slots, jnp.asarray(tree[None]) if kind == "tree" else None)
    if kind == "window":
        seen &= jnp.arange(slots) > start[:, None, None] - 70
    few = functools.partial(kernels.few_queries_on_gpu, scale=SCALE, interpret=True)
    wanted = jax.jit(few)(query, *staged, seen)
    together = jnp.concatenate([query, new_keys, new_values], axis=2)
    given = None if kind == "causal" else seen
    writing = functools.partial(few, whole=kind != "window")
    made = jax.jit(writing)(together, keys, values, given, start=start)
    for found, other in zip(made, (wanted, *staged), strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(other))


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"width": 63}, True),
        ({"width": 64}, False),
        ({"dim": 80}, False),
        ({"slots": 200}, False),
        ({"dtype": "int8"}, False),
        ({"heads": 7}, False),
    ],
)
def test_what_the_kernel_takes(change, taken):
    sizes = {"width": 5, "heads": 6, "dim": 64, "slots": 256, "dtype": "bfloat16", **change}
    query = jnp.zeros((1, sizes["width"], sizes["heads"], sizes["dim"]), jnp.bfloat16)
    cache = jnp.zeros((1, 2, sizes["slots"], sizes["dim"]), sizes["dtype"])
    assert kernels.takes_attention_on_gpu(query, cache, cache) == taken


def test_it_is_in_programs_for_nvidia_gpus():
    """And not in those for other chips, nor in gradients."""
    query = jnp.zeros((1, 5, 4, 64), jnp.bfloat16)
    cache, seen = jnp.zeros((1, 2, 256, 64), jnp.bfloat16), jnp.ones((1, 5, 256), bool)
    traced = jax.jit(gpu_attend).trace(query, cache, cache, seen)
    found = {
        platform: "few_queries" in traced.lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cuda", "rocm", "tpu", "cpu")
    }
    assert found == {"cuda": True, "rocm": False, "tpu": False, "cpu": False}
    several = jax.jit(jax.vmap(gpu_attend, (0, None, None, None)))
    traced = several.trace(jnp.stack([query] * 3), cache, cache, seen)
    assert "few_queries" in traced.lower(lowering_platforms=("cuda",)).as_text()
    slope = jax.grad(lambda query: gpu_attend(query, cache, cache, seen).astype(float).sum())
    assert "pallas_call" not in str(jax.make_jaxpr(slope)(query))


@pytest.mark.parametrize(
    ("platform", "capability", "form"),
    [
        ("gpu", "9.0", gpu_attend),
        ("gpu", "12.0", gpu_attend),
        ("gpu", "7.5", attend),
        ("gpu", "gfx942", attend),
        ("tpu", None, attend),
        ("cpu", None, cpu_attend),
    ],
)
def test_a_model_on_one_device_has_its_form(platform, capability, form):
    device: Any = types.SimpleNamespace(platform=platform, compute_capability=capability)
    assert attend_on(device) is form
    assert attend_on(None) is attend
    warned = contextlib.nullcontext()
    if capability == "7.5":
        warned = pytest.warns(UserWarning, match="this GPU has no products of bfloat16")
    with warned:
        assert _usual_dtype(device) == ("float32" if platform == "cpu" else "bfloat16")
