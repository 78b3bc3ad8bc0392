"""The kernel for attention of few tokens beside float64 and beside XLA: checks of one case each."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import kernels
from specjax.kernels import available, calling
from specjax.kernels.attending import Attention
from specjax.kernels.forms import Machine
from specjax.models import attend, cpu_attend, for_several_devices

SHAPES = [  # rows, tokens, heads, key heads, numbers of a head, slots
    (1, 1, 1, 1, 1, 1), (2, 3, 2, 2, 16, 7), (1, 5, 4, 2, 32, 64), (2, 16, 4, 2, 64, 257),
    (1, 5, 7, 1, 80, 1100), (3, 2, 14, 2, 128, 130), (1, 4, 2, 1, 20, 200), (1, 2, 2, 2, 300, 70),
    (1, 3, 12, 1, 8, 90),
]  # fmt: skip
LOOPS = (1, 20, 80)
"""Sizes of a head below a vector, with a rest behind vectors, and of whole vectors: every kind of
loop.  These are compared in both dtypes and with a soft cap."""
MASKS = ["chain", "tree", "window", "any"]


def mask(kind: str, batch: int, width: int, slots: int, seed: int = 0) -> np.ndarray:
    """[B, N, S]: which slots each token sees; the rows of a batch are not equally long."""
    rng = np.random.default_rng(seed)
    length = rng.integers(0, slots - width + 1, batch)
    length[0] = slots - width
    distance = length[:, None, None] + np.arange(width)[:, None] - np.arange(slots)
    if kind == "any":
        return (rng.random((batch, width, slots)) < 0.2) | (distance == 0)
    if kind == "window":
        return (distance >= 0) & (distance < 5)
    if kind == "tree":  # token n has the parent (n - 1) // 2
        staged = np.eye(width, dtype=bool)
        for node in range(1, width):
            staged[node] |= staged[(node - 1) // 2]
        seen = distance[:, :1] > 0
        seen = np.repeat(seen, width, axis=1)
        for row in range(batch):
            seen[row, :, length[row] : length[row] + width] = staged
        return seen
    return distance >= 0


def drawn(shape: tuple[int, ...], dtype: str) -> list[np.ndarray]:
    """Queries, keys and values."""
    batch, width, heads, key_heads, dim, slots = shape
    rng = np.random.default_rng(hash(shape) % 2**32)
    cache = (batch, key_heads, slots, dim)
    query, keys, values = (
        rng.normal(size=size) for size in ((batch, width, heads, dim), cache, cache)
    )
    kind = jnp.dtype(dtype)
    return [(2 * query).astype(np.float32), *(x.astype(kind) for x in (keys, values))]


@functools.cache
def compiled(scale: float, softcap: float | None, *kernel: object) -> Callable[..., jax.Array]:
    """One program for each shape and kernel; which kernel is found while it is traced."""
    return jax.jit(functools.partial(kernels.few_queries, scale=scale, softcap=softcap))


def run(inputs: list[Any], seen: np.ndarray, softcap: float | None = None) -> np.ndarray:
    scale = inputs[0].shape[3] ** -0.5
    call = compiled(scale, softcap, available.made, available._LLVMLITE)
    return np.asarray(call(*inputs, seen))


def exact(inputs: list[Any], seen: np.ndarray, softcap: float | None = None) -> np.ndarray:
    query, keys, values = (np.asarray(x, np.float64) for x in inputs)
    groups = query.shape[2] // keys.shape[1]
    keys, values = (np.repeat(x, groups, axis=1) for x in (keys, values))
    scores = np.einsum("bnhd,bhsd->bnhs", query, keys) * query.shape[3] ** -0.5
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(seen[:, :, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bnhs,bhsd->bnhd", weights, values)


def close(made: np.ndarray, wanted: np.ndarray) -> None:
    """To a few roundings of float32: of scores up to 10, and of sums of values up to 5."""
    np.testing.assert_allclose(made, wanted, rtol=0, atol=3e-6)


def check_numbers(shape: tuple[int, ...], dtype: str):
    """Each size of a head is a kernel of its own, and so is a soft cap."""
    inputs = drawn(shape, dtype)
    assert kernels.takes_attention(inputs[0], inputs[1], None)
    for kind in MASKS:
        seen = mask(kind, shape[0], shape[1], shape[5])
        close(run(inputs, seen), exact(inputs, seen))
    if shape[4] in LOOPS:
        close(run(inputs, seen, 1.5), exact(inputs, seen, 1.5))
    together = seen[:1]  # one mask for all rows
    close(run(inputs, together), exact(inputs, together))


def check_other_processor(monkeypatch: pytest.MonkeyPatch, dtype: str, lanes: int, registers: int):
    """Their vectors are cut into those of this one."""
    if Machine(lanes, registers) == calling.machine():
        return  # other tests run these
    for dim, softcap in ((20, None), (80, 2.0)):
        work = Attention(dtype, dim, softcap is not None, Machine(lanes, registers))
        target = calling.register(work, f"specjax_test_attention_{lanes}_{dtype}_{dim}")
        monkeypatch.setattr(available, "made", lambda *of, target=target: target)
        inputs = drawn((2, 3, 4, 2, dim, 130), dtype)
        seen = mask("tree", 2, 3, 130)
        close(run(inputs, seen, softcap), exact(inputs, seen, softcap))


def check_gradient(slots: int, softcap: float | None):
    inputs = drawn((2, 3, 4, 2, 8, slots), "float32")
    seen = jnp.asarray(mask("chain", 2, 3, slots))

    def gradient(mix):
        def loss(*inputs):
            return jnp.sin(mix(*inputs, seen, None, softcap)).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2)))(*inputs)

    for ours, theirs in zip(gradient(cpu_attend), gradient(attend), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def kernel_of(dtype: str, int8: bool = False) -> str:
    """Returns the name of the kernel that attends: of whole layers, or of attention alone."""
    alone = int8 and dtype == "bfloat16"
    return "specjax_attention_" if alone else "specjax_layers_"


def check_step(dtype: str, width: int):
    target = specjax.load(specjax.shipped("tiny/target"), dtype)
    cache = target.model.init_cache(1, 96)

    def turn(carried):
        cache, tokens = carried
        positions = cache.length[:, None] + jnp.arange(width)
        out = target.model.apply(target.params, tokens, positions, cache)
        return out.cache.commit(jnp.full(1, width)), jnp.argmax(out.logits, -1).astype(jnp.int32)

    def steps(cache):
        return jax.lax.fori_loop(0, 4, lambda _, carried: turn(carried), (cache, begun))

    begun = jnp.ones((1, width), jnp.int32)
    program = str(jax.jit(steps, donate_argnums=0).lower(cache).compile().as_text())
    shape = ",".join(map(str, cache.keys[0].shape))
    assert re.search(rf"\[{shape}\]", program) and kernel_of(dtype) in program
    assert re.findall(rf"= \w+\[{shape}\]\S* (?:copy|convert)\(", program) == []


def check_loaded(dtype: str, int8: bool):
    """On one device, from a cache, with few tokens; and never in the model for several devices."""
    target = specjax.load(specjax.shipped("tiny/target"), dtype)
    target = specjax.quantise(target) if int8 else target
    other = for_several_devices(target)

    def program(model, width: int):
        tokens, cache = jnp.arange(width)[None], model.model.init_cache(1, 64)

        def call(params):
            return model.model.apply(params, tokens, tokens, cache).logits

        return jax.jit(call)

    texts = [
        program(model, width).lower(target.params).as_text()
        for model, width in ((target, 5), (target, 17), (other, 5))
    ]
    kernel = kernel_of(dtype, int8)
    many = "layers" in kernel and kernels.most_rows(dtype) >= 17
    assert [kernel in text for text in texts] == [True, many, False]
    assert "specjax_" not in texts[2]
    ours, theirs = (
        np.asarray(program(model, 5)(target.params), np.float32) for model in (target, other)
    )
    # Logits from 16 to 32 are 2e-6 apart in float32, and those from 8 to 16 are 1/16 in bfloat16.
    np.testing.assert_allclose(ours, theirs, atol=4e-5 if dtype == "float32" else 4 / 16)
