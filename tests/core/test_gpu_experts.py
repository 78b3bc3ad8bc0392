"""The kernel for experts of few tokens on a GPU, computed on this machine: numbers, bits, what it
reads, and where it is taken."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import kernels
from specjax.models.feed_forward import Stacks, by_kernel

EXPERTS, INPUTS, COLUMNS = 8, 48, 32


@functools.cache
def kernel():
    def few(x, chosen, stacks):
        plain = [kernels.GpuCodes.plain(stack) for stack in stacks]
        return kernels.few_experts_on_gpu(x, chosen, plain, interpret=True)

    return jax.jit(few)


def stacks(dtype: str = "float32") -> list[jax.Array]:
    draws = np.random.default_rng(0).standard_normal((2, EXPERTS, INPUTS, COLUMNS), np.float32)
    return [jnp.asarray(draw, dtype) for draw in draws]


def drawn(tokens: int, count: int, few: int = EXPERTS) -> tuple[jax.Array, jax.Array]:
    """The row of each pair, and the experts of each token, which are among the first `few`."""
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((tokens * count, INPUTS), np.float32)
    chosen = np.stack([rng.permutation(few)[:count] for _ in range(tokens)])
    return jnp.asarray(x), jnp.asarray(chosen.astype(np.int32))


@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (1, 3), (9, 3), (20, 6)])
def test_numbers_and_bits(tokens, count):
    """Each row is that of its expert, experts that no token chose may be NaN, and the rows of a
    token alone have the same bits."""
    x, chosen = drawn(tokens, count, EXPERTS - 2)
    spoilt = [stack.at[-2:].set(jnp.nan) for stack in stacks()]
    made = kernel()(x, chosen, spoilt)
    for found, stack in zip(made, stacks(), strict=True):
        matrices = np.asarray(stack, np.float64)[np.asarray(chosen).reshape(-1)]
        wanted = np.einsum("pi,pio->po", np.asarray(x, np.float64), matrices)
        np.testing.assert_allclose(np.asarray(found), wanted, rtol=0, atol=1e-5)
    last = slice((tokens - 1) * count, None)
    alone = kernel()(x[last], chosen[-1:], spoilt)
    for found, single in zip(made, alone, strict=True):
        np.testing.assert_array_equal(np.asarray(found)[last], np.asarray(single))


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"tokens": 64}, True),
        ({"tokens": 65}, False),
        ({"columns": 40}, False),
        ({"inputs": 40}, False),
        ({"dtype": "float32"}, False),
    ],
)
def test_what_the_kernel_takes(change, taken):
    sizes = {"tokens": 2, "inputs": 64, "columns": 48, "dtype": "bfloat16", **change}
    stack = jnp.zeros((4, sizes["inputs"], sizes["columns"]), sizes["dtype"])
    chosen = jnp.zeros((sizes["tokens"], 2), jnp.int32)
    x = jnp.zeros((sizes["tokens"] * 2, sizes["inputs"]), jnp.bfloat16)
    of = Stacks(None, stack, stack.swapaxes(1, 2))
    form = functools.partial(by_kernel, lambda gate, up: up)
    text = jax.jit(form).trace(x, chosen, of).lower(lowering_platforms=("cuda",)).as_text()
    assert ("few_experts" in text) == taken


def test_it_is_in_programs_for_nvidia_gpus():
    """And not in those for other chips, nor in gradients."""

    def inner(gate, up):
        return jax.nn.silu(gate) * up

    x, chosen = jnp.zeros((6, 64), jnp.bfloat16), jnp.zeros((3, 2), jnp.int32)
    wide, narrow = (jnp.zeros((4, *shape), jnp.bfloat16) for shape in ((64, 32), (32, 64)))
    of = Stacks(wide, wide, narrow)
    form = functools.partial(by_kernel, inner)
    traced = jax.jit(form).trace(x, chosen, of)
    found = {
        platform: "few_experts" in traced.lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cuda", "rocm", "tpu", "cpu")
    }
    assert found == {"cuda": True, "rocm": False, "tpu": False, "cpu": False}
    slope = jax.grad(lambda x: form(x, chosen, of).astype(float).sum())
    assert "pallas_call" not in str(jax.make_jaxpr(slope)(x))
