"""The forms in which experts are computed, beside a sum over all experts, and what they read."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import kernels
from specjax.kernels import available
from specjax.models.feed_forward.by_expert import Stacks, grouped, in_tiles, tile_size
from specjax.models.products import stacked_product

pytestmark = pytest.mark.xdist_group("experts")  # a share takes all of them, or none

EXPERTS, COUNT, HIDDEN, INNER = 20, 3, 40, 24


def inner(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


@functools.cache
def stacks(biased: bool) -> Stacks:
    rng = np.random.default_rng(1)

    def weights(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * 0.3)

    shapes = ((HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN))
    matrices = [weights(EXPERTS, *shape) for shape in shapes]
    biases = [weights(EXPERTS, shape[1]) for shape in shapes]
    return Stacks(matrices[0], matrices[1], matrices[2], tuple(biases) if biased else None)


def drawn(tokens: int, few: int = EXPERTS) -> tuple[jax.Array, jax.Array]:
    """The inputs of each pair, and the experts of each token, which are among the first `few`."""
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((tokens * COUNT, HIDDEN), np.float32)
    chosen = np.stack([rng.permutation(few)[:COUNT] for _ in range(tokens)])
    return jnp.asarray(x), jnp.asarray(chosen.astype(np.int32))


def naive(x: jax.Array, chosen: jax.Array, of: Stacks) -> np.ndarray:
    """One pair after the other, in float64."""
    arrays = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), of)
    out = []
    for row, e in zip(np.asarray(x, np.float64), np.asarray(chosen).reshape(-1), strict=True):
        biases = [0.0, 0.0, 0.0] if arrays.biases is None else [b[e] for b in arrays.biases]
        gate, up = row @ arrays.gate[e] + biases[0], row @ arrays.up[e] + biases[1]
        out.append((gate / (1 + np.exp(-gate)) * up) @ arrays.down[e] + biases[2])
    return np.stack(out)


@functools.cache
def run(form):
    return jax.jit(functools.partial(form, inner))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 30, 150])
def test_both_forms_are_right(tokens: int, biased: bool):
    """Tiles of one row, of as many rows as tokens, and several tiles of one expert."""
    x, chosen = drawn(tokens)
    wanted = naive(x, chosen, stacks(biased))
    for form in (grouped, in_tiles):
        found = run(form)(x, chosen, stacks(biased))
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


def test_all_tokens_may_choose_the_same_experts():
    x, chosen = drawn(60, few=COUNT)
    wanted = naive(x, chosen, stacks(True))
    found = run(in_tiles)(x, chosen, stacks(True))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 8, 150])
def test_an_expert_that_no_token_chose_is_not_read(tokens: int, dtype: str):
    """Its numbers may be NaN, and no program makes room for a copy of all experts."""
    x, chosen = drawn(tokens, few=EXPERTS - 2)
    of = jax.tree.map(lambda leaf: leaf.astype(dtype), stacks(True))
    spoilt = jax.tree.map(lambda leaf: leaf.at[-2:].set(jnp.nan), of)
    x = x.astype(dtype)
    program = run(in_tiles).lower(x, chosen, of).compile()
    found, wanted = (np.asarray(program(x, chosen, each), np.float32) for each in (spoilt, of))
    np.testing.assert_array_equal(found, wanted)
    kept = program.memory_analysis().temp_size_in_bytes
    assert kept < 8 * (len(x) + 128) * HIDDEN * 4 + 3 * HIDDEN * INNER * 4


def test_a_tile_reads_each_chosen_expert_of_few_tokens_once():
    for tokens in range(1, 9):
        assert tile_size(tokens, 8, 128) == tokens
    assert tile_size(512, 8, 128) == 64
    assert tile_size(10**5, 2, 8) == 128
    assert tile_size(1, 4, 4) == 1


@pytest.mark.parametrize("tokens", [1, 8])
def test_few_tokens_read_each_chosen_expert_once(monkeypatch: pytest.MonkeyPatch, tokens: int):
    """One token, and a tree of eight: three matrices of each expert, and none of another."""
    read = []

    def counted(x, stack, number, alone):
        jax.debug.callback(lambda e: read.append(int(e)), number)
        return stacked_product(x, stack, number, alone)

    monkeypatch.setattr("specjax.models.feed_forward.by_expert.stacked_product", counted)
    x, chosen = drawn(tokens)
    jax.block_until_ready(jax.jit(functools.partial(in_tiles, inner))(x, chosen, stacks(False)))
    jax.effects_barrier()
    assert sorted(read) == sorted(3 * np.unique(chosen).tolist())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("inner", "outer"), [(1, 1), (7, 5), (33, 130), (256, 704)])
def test_the_product_with_one_of_a_stack_is_right(dtype: str, inner: int, outer: int):
    rng = np.random.default_rng(inner)
    stack = jnp.asarray(rng.standard_normal((3, inner, outer), np.float32)).astype(dtype)
    x = jnp.asarray(rng.standard_normal((20, inner), np.float32))
    assert kernels.takes_stacked(stack)

    @jax.jit
    def products(x, stack, number):
        return [kernels.few_rows_of(x[:rows], stack, number) for rows in (1, 2, 3, 5, 8, 13, 20)]

    for e in range(3):
        exact = np.asarray(x, np.float64) @ np.asarray(stack[e], np.float64)
        for found in products(x, stack, jnp.int32(e)):
            wanted = exact[: len(found)]
            np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6 * inner)
            # The bits of a row do not depend on the rows beside it.
            assert found.tobytes() == products(x, stack, jnp.int32(e))[-1][: len(found)].tobytes()


def test_without_the_kernel_xla_multiplies(monkeypatch: pytest.MonkeyPatch):
    x, chosen = drawn(7)
    wanted = naive(x, chosen, stacks(True))
    monkeypatch.setattr(available, "made", lambda *of: None)
    assert not kernels.takes_stacked(stacks(True).gate)
    found = jax.jit(functools.partial(in_tiles, inner))(x, chosen, stacks(True))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())
    with pytest.raises(ValueError, match="no kernel for a stack of float32 on this CPU"):
        kernels.few_rows_of(x[:1], stacks(True).gate, jnp.int32(0))


def test_the_gradient_is_that_of_the_other_form():
    x, chosen = drawn(9)

    def loss(form, x, of):
        return (form(inner, x, chosen, of) ** 2).sum()

    ours, theirs = (
        jax.jit(jax.grad(functools.partial(loss, form), (0, 1)))(x, stacks(True))
        for form in (in_tiles, grouped)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), ours, theirs)
