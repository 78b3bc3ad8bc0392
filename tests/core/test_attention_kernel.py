"""The kernel for attention of few tokens on a CPU: numbers, bits, threads, and where it is not
used."""

from __future__ import annotations

import concurrent.futures
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


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, "float32") for shape in SHAPES),
        *(
            pytest.param(shape, "bfloat16", marks=() if shape[4] in LOOPS else pytest.mark.slow)
            for shape in SHAPES
        ),
    ],
)
def test_numbers_are_those_of_float64(shape: tuple[int, ...], dtype: str):
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
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loops_for_other_processors_are_right(
    monkeypatch: pytest.MonkeyPatch, dtype: str, lanes: int, registers: int
):
    """Their vectors are cut into those of this one."""
    if Machine(lanes, registers) == calling.machine():
        return  # every other test runs these
    for dim, softcap in ((20, None), (80, 2.0)):
        work = Attention(dtype, dim, softcap is not None, Machine(lanes, registers))
        target = calling.register(work, f"specjax_test_attention_{lanes}_{dtype}_{dim}")
        monkeypatch.setattr(available, "made", lambda *of, target=target: target)
        inputs = drawn((2, 3, 4, 2, dim, 130), dtype)
        seen = mask("tree", 2, 3, 130)
        close(run(inputs, seen, softcap), exact(inputs, seen, softcap))


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


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("slots", [23, 1100])
def test_the_gradient_is_that_without_the_kernel(slots: int, softcap: float | None):
    inputs = drawn((2, 3, 4, 2, 8, slots), "float32")
    seen = jnp.asarray(mask("chain", 2, 3, slots))

    def gradient(mix):
        def loss(*inputs):
            return jnp.sin(mix(*inputs, seen, None, softcap)).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2)))(*inputs)

    for ours, theirs in zip(gradient(cpu_attend), gradient(attend), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_a_batched_form_is_each_alone():
    inputs = [jnp.stack(pair) for pair in zip(*[drawn((1, 3, 2, 1, 8, n), "float32")
              for n in (30, 30)], strict=True)]  # fmt: skip
    inputs[0] = inputs[0].at[1].add(1.0)
    seen = jnp.asarray(mask("chain", 1, 3, 30))
    both = jax.jit(jax.vmap(lambda *x: cpu_attend(*x, seen)))(*inputs)
    for i in range(2):
        alone = jax.jit(cpu_attend)(*(x[i] for x in inputs), seen)
        np.testing.assert_array_equal(np.asarray(both[i]), np.asarray(alone))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [1, 5])
def test_a_step_of_one_row_neither_copies_nor_converts_its_cache(dtype: str, width: int):
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
    assert re.search(rf"\[{shape}\]", program) and "specjax_attention_" in program
    assert re.findall(rf"= \w+\[{shape}\]\S* (?:copy|convert)\(", program) == []


@pytest.mark.parametrize(("dtype", "int8"), [("float32", True), ("bfloat16", False)])
def test_a_loaded_model_attends_with_the_kernel(dtype: str, int8: bool):
    """On one device, from a cache, with few tokens; and never in the model for several devices."""
    target = specjax.load(specjax.shipped("tiny/target"), dtype)
    target = specjax.quantise(target) if int8 else target
    other = for_several_devices(target)
    cache = target.model.init_cache(1, 64)

    def program(model, width: int):
        tokens = jnp.arange(width)[None]

        def call(params):
            return model.model.apply(params, tokens, tokens, cache).logits

        return jax.jit(call)

    texts = [
        program(model, width).lower(target.params).as_text()
        for model, width in ((target, 5), (target, 17), (other, 5))
    ]
    assert ["specjax_attention_" in text for text in texts] == [True, False, False]
    assert "specjax_" not in texts[2]
    ours, theirs = (
        np.asarray(program(model, 5)(target.params), np.float32) for model in (target, other)
    )
    # Logits from 16 to 32 are 2e-6 apart in float32, and those from 8 to 16 are 1/16 in bfloat16.
    np.testing.assert_allclose(ours, theirs, atol=4e-5 if dtype == "float32" else 4 / 16)


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
