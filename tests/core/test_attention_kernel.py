"""The kernel for attention of few tokens on a CPU: numbers, bits, threads, and where it is not
used."""

from __future__ import annotations

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_kernels import (
    LOOPS,
    MASKS,
    SHAPES,
    check_gradient,
    check_loaded,
    check_numbers,
    check_other_processor,
    check_step,
    drawn,
    mask,
    run,
)

from specjax import kernels
from specjax.kernels import available, calling
from specjax.kernels.attending import Attention
from specjax.models import attend, cpu_attend

ELSEWHERE = (32, 64, 128, 300)
"""Sizes of a head whose loops are like those of others; `tests/product` has them."""


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, "float32") for shape in SHAPES if shape[4] not in ELSEWHERE),
        *((shape, "bfloat16") for shape in SHAPES if shape[4] in LOOPS),
    ],
)
def test_numbers_are_those_of_float64(shape: tuple[int, ...], dtype: str):
    check_numbers(shape, dtype)


def test_great_and_small_scores():
    """Weights below float32's range are 0 to six digits, and a sum of equal ones is exact."""
    keys = jnp.asarray([0.0, -50.0, 1e4, 3e38, 1e4, -3e38])[None, None, :, None]
    values = jnp.asarray([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])[None, None, :, None]
    seen = np.zeros((1, 4, 6), bool)
    for token, slots in enumerate(([0, 1], [0, 1, 2, 4], [0, 3, 5], [5])):
        seen[0, token, slots] = True
    made = run([jnp.ones((1, 4, 1, 1)), keys, values], seen)
    np.testing.assert_allclose(made.reshape(-1), [1, 4, 4, 6], rtol=1e-6)
    # From one block of slots to the next scores fall by 100 and grow by 300.
    keys = jnp.repeat(jnp.asarray([0.0, -100.0, 200.0]), 64)[None, None, :, None]
    values = jnp.repeat(jnp.asarray([1.0, 2.0, 3.0]), 64)[None, None, :, None]
    seen = np.arange(192) < np.asarray([128, 192])[:, None]
    made = run([jnp.ones((1, 2, 1, 1)), keys, values], seen[None])
    np.testing.assert_allclose(made.reshape(-1), [1, 3], rtol=1e-6)


@pytest.mark.parametrize("dim", [1, 16])
def test_the_sign_of_a_zero_does_not_depend_on_the_other_tokens(dim: int):
    """A sum that is too small for float32 is -0, to which the others' slots would add 0."""
    keys = jnp.zeros((1, 1, 192, dim)).at[0, 0, 64, 0].set(80.0 * dim**0.5)
    values = jnp.zeros((1, 1, 192, dim)).at[0, 0, 0].set(-1e-37).at[0, 0, 128:].set(1.0)
    seen = np.zeros((1, 2, 192), bool)
    seen[:, :, [0, 64]] = seen[0, 1, 128] = True
    query = jnp.ones((1, 2, 1, dim))
    both, alone = (run([query[:, :n], keys, values], seen[:, :n]) for n in (2, 1))
    assert both[:, :1].tobytes() == alone.tobytes()


def test_a_score_that_is_no_number_is_seen():
    seen = mask("chain", 1, 2, 9)
    query, keys, values = drawn((1, 2, 1, 1, 16, 9), "float32")
    values_of_8, keys[0, 0, 8] = keys[0, 0, 8].copy(), np.nan
    made = run([query, keys, values], seen)
    assert np.isfinite(made[0, 0]).all() and np.isnan(made[0, 1]).all()
    keys[0, 0, 8], values[0, 0, 8, 3] = values_of_8, np.inf
    made = run([query, keys, values], seen)
    assert np.isfinite(made[0, 0]).all() and np.isinf(made[0, 1, 0, 3])


@pytest.mark.parametrize("dim", [16, 80])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_depend_on_what_a_token_sees_alone(dtype: str, dim: int):
    """Not on the other tokens, the other rows, the size of the cache, or unseen slots."""
    slots, width, sizes = 201, 16, (202, 256, 700)
    inputs = drawn((2, width, 4, 2, dim, slots), dtype)
    query, keys, values = inputs
    cuts = [(0, 1), (0, 5), (3, 10), (15, 16)]

    @jax.jit  # all of them in one program
    def parts(query, keys, values, seen):
        mix = functools.partial(kernels.few_queries, scale=dim**-0.5, softcap=None)
        some = [
            mix(query[:, first:last], keys, values, seen[:, first:last]) for first, last in cuts
        ]
        row = mix(query[1:], keys[1:], values[1:], seen[1:])
        head = mix(query[:, :, 3:], keys[:, 1:], values[:, 1:], seen)
        longer = []
        for size in sizes:
            more = [(0, 0), (0, 0), (0, size - slots), (0, 0)]
            padded = [jnp.pad(x, more, constant_values=jnp.nan) for x in (keys, values)]
            wider = jnp.pad(seen, [(0, 0), (0, 0), (0, size - slots)])
            longer.append(mix(query, *padded, wider))
        return some, row, head, longer

    for kind in MASKS:
        seen = mask(kind, 2, width, slots)
        wanted = run(inputs, seen)
        some, row, head, longer = jax.tree.map(np.asarray, parts(*inputs, seen))
        for (first, last), made in zip(cuts, some, strict=True):
            assert made.tobytes() == wanted[:, first:last].tobytes()
        assert row.tobytes() == wanted[1:].tobytes()
        assert head.tobytes() == wanted[:, :, 3:].tobytes()
        assert all(made.tobytes() == wanted.tobytes() for made in longer)
        # What some tokens see the others do not: each is compared where it does not see garbage.
        for garbage in (np.nan, np.inf, 3e38):
            hidden = ~seen[:, 5:6, :, None]
            spoilt = [np.where(hidden, np.array(garbage, x.dtype), x) for x in (keys, values)]
            made = run([query, *spoilt], seen)
            assert made[:, 5].tobytes() == wanted[:, 5].tobytes()


def test_a_token_that_sees_nothing_has_zeros():
    inputs = drawn((1, 2, 1, 1, 16, 9), "float32")
    seen = mask("chain", 1, 2, 9)
    seen[0, 0] = False
    assert not run(inputs, seen)[0, 0].any()
    assert not run(inputs, np.zeros_like(seen)).any()


@pytest.mark.parametrize("lanes, registers", [(4, 32), (8, 16), (16, 32)])
def test_the_loops_for_other_processors_are_right(
    monkeypatch: pytest.MonkeyPatch, lanes: int, registers: int
):
    check_other_processor(monkeypatch, "float32", lanes, registers)


def test_bits_do_not_depend_on_the_parts(monkeypatch: pytest.MonkeyPatch):
    """With more threads than pairs of a row and a head of keys, each query head is a part."""

    class Split(Attention):
        def parts(self, emit, sizes, threads, worth):
            return emit.b.mul(sizes[0], sizes[2])

    inputs = drawn((2, 3, 8, 2, 16, 100), "float32")
    seen = mask("tree", 2, 3, 100)
    wanted = run(inputs, seen)
    work = Split("float32", 16, False, calling.machine())
    target = calling.register(work, "specjax_test_attention_split")
    monkeypatch.setattr(available, "made", lambda *of: target)
    assert run(inputs, seen).tobytes() == wanted.tobytes()


def test_several_programs_at_once_give_the_same_bits():
    cases = [
        (drawn((2, 5, 8, 4, 64, 600), dtype), mask("chain", 2, 5, 600))
        for dtype in ("float32", "bfloat16")
    ]
    call = jax.jit(functools.partial(kernels.few_queries, scale=0.1, softcap=None))
    expected = [np.asarray(call(*x, jnp.asarray(seen))).tobytes() for x, seen in cases]

    def again(i: int) -> bool:
        inputs, seen = cases[i % 2]
        return np.asarray(call(*inputs, jnp.asarray(seen))).tobytes() == expected[i % 2]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(again, range(300)))


@pytest.mark.parametrize(("slots", "softcap"), [(1100, None), (23, 3.0)])
def test_the_gradient_is_that_without_the_kernel(slots: int, softcap: float | None):
    check_gradient(slots, softcap)


def test_a_batched_form_is_each_alone():
    inputs = [jnp.stack(pair) for pair in zip(*[drawn((1, 3, 2, 1, 8, n), "float32")
              for n in (30, 30)], strict=True)]  # fmt: skip
    inputs[0] = inputs[0].at[1].add(1.0)
    seen = jnp.asarray(mask("chain", 1, 3, 30))
    both = jax.jit(jax.vmap(lambda *x: cpu_attend(*x, seen)))(*inputs)
    for i in range(2):
        alone = jax.jit(cpu_attend)(*(x[i] for x in inputs), seen)
        np.testing.assert_array_equal(np.asarray(both[i]), np.asarray(alone))


@pytest.mark.parametrize(("dtype", "width"), [("float32", 1), ("bfloat16", 5)])
def test_a_step_of_one_row_neither_copies_nor_converts_its_cache(dtype: str, width: int):
    check_step(dtype, width)


def test_a_loaded_model_attends_with_the_kernel():
    check_loaded("float32", int8=True)


def test_without_llvmlite_or_where_it_fails_xla_attends(monkeypatch: pytest.MonkeyPatch):
    inputs = drawn((1, 2, 2, 1, 8, 30), "float32")
    seen = mask("chain", 1, 2, 30)
    available.made.cache_clear()
    monkeypatch.setattr(available, "_LLVMLITE", (10**6, 0))
    assert not kernels.takes_attention(inputs[0], inputs[1], None)
    with pytest.raises(ValueError, match="no kernel for float32"):
        run(inputs, seen)
    made = cpu_attend(*inputs, jnp.asarray(seen))
    np.testing.assert_array_equal(np.asarray(made), attend(*inputs, jnp.asarray(seen)))
    monkeypatch.undo()

    def failing(*of: object) -> str:
        raise RuntimeError("this version is unknown")

    available.made.cache_clear()
    monkeypatch.setattr("specjax.kernels.calling.attention", failing)
    with pytest.warns(UserWarning, match="no kernel for attention in float32.*is unknown"):
        assert not kernels.takes_attention(inputs[0], inputs[1], None)
    available.made.cache_clear()


def test_other_attention_is_left_to_xla():
    query, keys, _ = drawn((1, kernels.MOST_TOKENS + 1, 4, 2, 8, 30), "float32")
    assert kernels.takes_attention(query[:, 1:], keys, None)
    assert not kernels.takes_attention(query, keys, None)
    assert not kernels.takes_attention(query[:, :0], keys, None)
    assert not kernels.takes_attention(query[:, :1, :0], keys, None)
    assert not kernels.takes_attention(query[:, :1], keys.astype(jnp.float16), None)
    assert not kernels.takes_attention(query[:, :1], keys[:, :, :0], None)
