"""The kernels for few rows on a CPU: numbers, bits, threads, and where they are not used."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from few_rows import SUMMED, check_loaded, check_other_processor, drawn

from specjax import kernels
from specjax.kernels import available, calling
from specjax.kernels.columns import product_of
from specjax.kernels.forms import FORMS
from specjax.models import cpu_dot_general, dot_general

# Sizes below and above those of vectors, blocks of rows, parts and tiles.
SHAPES = [(1, 1), (7, 5), (16, 16), (33, 130), (300, 3), (256, 704), (1100, 2300)]


@functools.cache
def multiply(dtype: str):
    return jax.jit(functools.partial(kernels.few_rows, summed=SUMMED[dtype]))


ROWS = (1, 2, 3, 4, 5, 6, 7, 11, 13, 16, 20, 25, 48, 61, 128)


@functools.cache
def multiply_parts(dtype: str, rows: tuple[int, ...]):
    """The products of all rows, of the first few for each number, and of two in the middle, in one
    program."""

    def parts(x, weights):
        cuts = [x, *(x[:n] for n in rows), x[9:11]]
        return [kernels.few_rows(cut, weights, SUMMED[dtype]) for cut in cuts]

    return jax.jit(parts)


@pytest.mark.parametrize("dtype", SUMMED)
@pytest.mark.parametrize("inner, outer", SHAPES)
def test_the_product_is_right_and_its_bits_do_not_depend_on_the_rows(
    dtype: str, inner: int, outer: int
):
    """Every number of rows meets several shapes."""
    x, weights = drawn(dtype, inner, outer)
    assert kernels.takes(1, weights, SUMMED[dtype])
    exact = np.asarray(weights, np.float64)
    exact = np.asarray(x, np.float64) @ (exact if SUMMED[dtype] == 0 else exact.T)
    rows = ROWS[SHAPES.index((inner, outer)) % 3 :: 3]
    all_rows, *firsts, middle = map(np.asarray, multiply_parts(dtype, rows)(x, weights))
    bound = 0 if dtype == "int8" else 2e-6 * inner
    np.testing.assert_allclose(all_rows, exact, rtol=0, atol=bound)
    for count, some in zip(rows, firsts, strict=True):
        assert some.tobytes() == all_rows[:count].tobytes()
    assert middle.tobytes() == all_rows[9:11].tobytes()


@pytest.mark.parametrize(
    ("dtype", "lanes", "registers"),
    [
        *(("float32", *machine) for machine in ((4, 32), (8, 16), (16, 32))),
        ("bfloat16", 16, 32), ("int8", 4, 32),
    ],
)  # fmt: skip
def test_the_loops_for_other_processors_are_right(
    monkeypatch: pytest.MonkeyPatch, dtype: str, lanes: int, registers: int
):
    """`tests/product/test_few_rows.py` has the other dtypes of each."""
    check_other_processor(monkeypatch, dtype, lanes, registers)


@contextlib.contextmanager
def kept_in(folder: pathlib.Path) -> Iterator[None]:
    names = "jax_compilation_cache_dir", "jax_enable_compilation_cache"
    before = [getattr(jax.config, name) for name in names]
    try:
        for name, value in zip(names, (str(folder), True), strict=True):
            jax.config.update(name, value)
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            jax.config.update(name, value)


def test_machine_code_is_kept_between_processes(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """What is found is not compiled, and gives the same bits; a file that is cut is made anew."""
    work, name = product_of(FORMS["float32"], calling.machine()), "specjax_kept"
    x, weights = drawn("float32", 40, 70)

    def product(target: str) -> np.ndarray:
        with monkeypatch.context() as patched:
            patched.setattr(available, "made", lambda *kind: target)
            return np.asarray(jax.jit(lambda *inputs: kernels.few_rows(*inputs, 0))(x, weights))

    def address() -> int:
        """Of a kernel whose piece is not in this process yet."""
        monkeypatch.setattr(calling, "_pieces", set())
        return calling.address_of(work, name)

    with kept_in(tmp_path):
        address()
        kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
        assert len(kept) == 2  # the piece, and what calls it
        with monkeypatch.context() as broken:
            broken.setattr(calling.binding, "create_pass_builder", None)
            found = address()
            for path, whole in kept.items():
                path.write_bytes(whole[:-1])
                with pytest.raises(TypeError):
                    address()
                path.write_bytes(whole)
        for path, whole in kept.items():
            path.write_bytes(whole[:-1])
        monkeypatch.setattr(calling, "_pieces", set())
        calling.register(work, name)
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == kept
    jax.ffi.register_ffi_target("specjax_found", calling._capsule(found), platform="cpu")
    assert product("specjax_found").tobytes() == product(name).tobytes()


def test_several_programs_at_once_give_the_same_bits():
    cases = [(dtype, *drawn(dtype, 640, 1500)) for dtype in SUMMED]
    expected = [np.asarray(multiply(dtype)(x, w)).tobytes() for dtype, x, w in cases]

    def again(i: int) -> bool:
        dtype, x, w = cases[i % 3]
        return np.asarray(multiply(dtype)(x, w)).tobytes() == expected[i % 3]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(again, range(300)))


def test_a_loop_of_products_is_right():
    """Calls that depend on each other, in a program of their own, many times."""
    x, weights = drawn("float32", 256, 256)
    weights = weights / 16

    def turn(_: int, x: jax.Array) -> jax.Array:
        return jnp.tanh(kernels.few_rows(x, weights, 0))

    looped = np.asarray(jax.jit(lambda x: jax.lax.fori_loop(0, 200, turn, x))(x[:5]))
    one = jax.jit(lambda x: turn(0, x))
    for _ in range(200):
        x = one(x[:5])
    np.testing.assert_array_equal(looped, np.asarray(x))


def test_the_product_has_a_gradient_and_a_batched_form():
    x, weights = drawn("float32", 24, 40)
    x = x[:3]
    last = (((1,), (0,)), ((), ()))

    def loss(product, x, weights):
        return jnp.sin(product(x, weights, last)).sum()

    for i in (1, 2):
        ours = jax.grad(loss, i)(cpu_dot_general, x, weights)
        theirs = jax.grad(loss, i)(dot_general, x, weights)
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), atol=1e-4)
    each = jax.vmap(lambda row: cpu_dot_general(row[None], weights, last)[0])(x)
    np.testing.assert_allclose(
        np.asarray(each), np.asarray(x, np.float64) @ np.asarray(weights, np.float64), atol=1e-4
    )


@pytest.mark.parametrize(("dtype", "int8"), [("float32", True), ("bfloat16", False)])
def test_a_loaded_model_multiplies_few_rows_with_the_kernels(dtype: str, int8: bool):
    check_loaded(dtype, int8)


def test_without_llvmlite_or_where_it_fails_xla_multiplies(monkeypatch: pytest.MonkeyPatch):
    _, weights = drawn("float32", 24, 40)
    available.made.cache_clear()
    monkeypatch.setattr(available, "_LLVMLITE", (10**6, 0))
    assert not kernels.takes(1, weights, 0)
    with pytest.raises(ValueError, match="no kernel for float32"):
        kernels.few_rows(jnp.ones((1, 24)), weights, 0)
    monkeypatch.undo()

    def failing(dtype: str) -> str:
        raise RuntimeError("this version is unknown")

    available.made.cache_clear()
    monkeypatch.setattr("specjax.kernels.calling.product", failing)
    with pytest.warns(UserWarning, match="no kernel for product in float32.*version is unknown"):
        assert not kernels.takes(1, weights, 0)
    available.made.cache_clear()


def test_other_products_are_left_to_xla():
    _, weights = drawn("float32", 24, 40)
    for dtype, summed in SUMMED.items():
        most = kernels.most_rows(dtype)
        assert kernels.takes(most, weights.astype(dtype), summed)
        assert not kernels.takes(most + 1, weights.astype(dtype), summed)
    assert not kernels.takes(1, weights, 1)
    assert not kernels.takes(1, weights.astype(jnp.float16), 1)
    assert not kernels.takes(0, weights, 0)
    assert not kernels.takes(1, weights[:0], 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_rows_are_read_as_they_are(dtype: str):
    """Without a reshape, which XLA would move from layer to layer."""
    x, weights = drawn(dtype, 24, 40)
    x = jnp.stack([x[:3], x[1:4]])
    read = jax.jit(lambda x: kernels.few_rows(x, weights, SUMMED[dtype]))
    assert "stablehlo.reshape" not in read.lower(x).as_text()
    for row, made in zip(x, read(x), strict=True):
        np.testing.assert_array_equal(made, read(row))


@pytest.mark.parametrize("rows", [1, 5, 17])
def test_activations_in_float32_are_not_rounded_to_the_dtype_of_the_weights(rows: int):
    """A router has them so, and tiles of bfloat16 numbers would round them."""
    x, weights = drawn("bfloat16", 96, 48)
    x = np.asarray(x[:rows], np.float32) * np.float32(1 + 2**-12)
    made = np.asarray(kernels.few_rows(jnp.asarray(x), jnp.asarray(weights), 1))
    exact = np.asarray(x, np.float64) @ np.asarray(weights, np.float64).T
    np.testing.assert_allclose(made, exact, rtol=0, atol=1e-4)
