"""The kernel of whole layers, beside the layers one by one."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import kernels
from specjax.caches import KVCache, PagedCache, places
from specjax.kernels import available, calling, layer_calls
from specjax.kernels.coding import VNNI
from specjax.kernels.forms import Machine
from specjax.kernels.layering import Layers
from specjax.methods.eagle3 import network as eagle3
from specjax.models import (
    Rope,
    Transformer,
    TransformerConfig,
    cpu_attend,
    cpu_dot_general,
    int8_form,
    rounded_weights,
)
from specjax.models import transformer as transformer_module
from specjax.models.packed import Packed

SMALL = TransformerConfig(
    vocab_size=64, hidden_size=48, mlp_size=80, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=32, max_positions=512,
)  # fmt: skip
CONFIGS = {
    "plain": SMALL,
    "biased": dataclasses.replace(
        SMALL, qkv_bias=True, qk_norm="head", head_dim=16, rope=Rope(theta=1e4, fraction=0.5)
    ),
    "capped": dataclasses.replace(
        SMALL,
        activation="gelu_tanh",
        norm_offset=1.0,
        attention_softcap=5.0,
        query_scale=0.3,
        num_kv_heads=1,
        head_dim=80,
    ),
    "one head": dataclasses.replace(SMALL, num_heads=1, num_kv_heads=1, head_dim=48, num_layers=1),
}
WEIGHTS = {
    "float32": None,
    "int8": None,
    "bfloat16": None,
    "matrices in bfloat16": None,
    "codes": dict(bits=8, group=32),
    "codes with a scale of their own": dict(bits=8),
    "codes of 4 bits": dict(bits=4, group=64, zeros=True),
    "rounded": dict(bits=8, group=64, rounds=True),
    "mixed": dict(bits=8, group=64),
}
KINDS = [(name, weights) for name in CONFIGS for weights in ("float32", "int8", "bfloat16")]
KINDS += [("plain", weights) for weights, coded in WEIGHTS.items() if coded]
KINDS += [("biased", "codes"), ("plain", "matrices in bfloat16")]
FEWER = [kind for kind in KINDS if kind[1] != "codes of 4 bits" and kind != ("biased", "codes")]
# Pages are found in the same way in every dtype: only float32 is tried with each size of page.
PAGED = [(*kind, page) for kind in KINDS for page in (16, 48, 128)]
PAGED = [kind for kind in PAGED if kind[1] == "float32" or kind[2] == 48]
SHAPES = [(1, 1), (1, 5), (3, 1), (2, 9), (1, 70)]  # rows, tokens


def packed(key: jax.Array, bits: int, group: int = 0, zeros: bool = False, rounds: bool = False):
    """Returns a function that makes a packed matrix of random codes for a matrix [in, out]."""

    def one(matrix: jax.Array) -> Packed:
        inputs, outputs = matrix.shape
        size = group or inputs
        drawn = jax.random.split(jax.random.fold_in(key, inputs * outputs), 3)
        codes = jax.random.bits(drawn[0], (outputs, inputs * bits // 8), jnp.uint8)
        scales = 0.4 + jax.random.uniform(drawn[1], (outputs, inputs // size))
        zero = jax.random.randint(drawn[2], scales.shape, 0, 16).astype(jnp.uint8)
        return Packed(
            codes if bits == 4 else codes.astype(jnp.int8), scales / (8 if bits == 4 else 128),
            zero if zeros else None, None, None, 0, inputs, size, False, bits == 4, False, True,
            rounds=rounds,
        )  # fmt: skip

    return one


def wider(c: TransformerConfig) -> TransformerConfig:
    """Returns sizes that the layouts of codes divide."""
    return dataclasses.replace(c, hidden_size=128, mlp_size=256, head_dim=64)


@functools.cache
def network(name: str, weights: str = "float32") -> tuple[Transformer, Any]:
    coded = WEIGHTS[weights]
    config = CONFIGS[name] if coded is None else wider(CONFIGS[name])
    narrow = weights == "bfloat16"
    module = Transformer(config, dot_general=cpu_dot_general, attend=cpu_attend, transposed=narrow)
    tokens = jnp.ones((1, 1), jnp.int32)
    boxed = module.init(jax.random.key(0), tokens, tokens)["params"]
    params = jax.tree.map(lambda leaf: leaf.unbox(), boxed, is_leaf=lambda x: hasattr(x, "unbox"))
    drawn = iter(jax.random.split(jax.random.key(1), 200))
    params = jax.tree.map(lambda x: x + 0.2 * jax.random.normal(next(drawn), x.shape), params)
    if coded is not None:
        for i in range(config.num_layers):
            for part in ("attention", "mlp"):
                for matrix, held in params[f"layer_{i}"][part].items():
                    if "norm" not in matrix:
                        other = {"bits": 4} if weights == "mixed" and matrix == "down" else {}
                        make = packed(jax.random.key(i), **{**coded, **other})
                        held["kernel"] = make(held["kernel"])
    if weights == "matrices in bfloat16":
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim == 2 else x, params)
        params["embedding"] = params["embedding"].astype(jnp.float32)
    if narrow:
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    if weights != "int8":
        return module, params
    return module.clone(dot_general=int8_form(cpu_dot_general)), rounded_weights(params)


def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_module, "form_of_layers", lambda *of: None)


def tree(width: int) -> jax.Array:
    """Which tokens each one sees, where token n has the parent (n - 1) // 2."""
    seen = np.eye(width, dtype=bool)
    for node in range(1, width):
        seen[node] |= seen[(node - 1) // 2]
    return jnp.asarray(seen[None])


def program(module: Transformer, taps: tuple[int, ...] = ()) -> Callable[..., Any]:
    def run(params: Any, tokens: Any, cache: Any, mask: Any) -> Any:
        positions = cache.next_positions(tokens.shape[1])
        return module.apply({"params": params}, tokens, positions, cache, mask, taps)

    return jax.jit(run)


@functools.cache
def known(name: str, weights: str) -> Callable[..., Any]:
    """Returns the program of a network as it is, without what a test has replaced."""
    return program(network(name, weights)[0])


@functools.cache
def read(name: str, weights: str, rows: int) -> Any:
    """A cache whose rows have read prompts of other lengths; other slots hold other numbers."""
    module, params = network(name, weights)
    dtype = jnp.bfloat16 if weights == "bfloat16" else jnp.float32
    cache = module.init_cache(rows, 150, dtype)
    filled = jax.tree.map(lambda x: x + 7.0, (cache.keys, cache.values))
    cache = dataclasses.replace(cache, keys=filled[0], values=filled[1])
    tokens = jnp.arange(rows * 40).reshape(rows, 40) % 64
    out = known(name, weights)(params, tokens, cache, None)
    return out.cache.commit(jnp.arange(rows) * 13 + 11)


def text_of(name: str, weights: str, rows: int, width: int) -> str:
    module, params = network(name, weights)
    tokens = jnp.zeros((rows, width), jnp.int32)
    return program(module).lower(params, tokens, read(name, weights, rows), None).as_text()


BOUNDS = {"int8": 2e-2, "rounded": 2e-2, "bfloat16": 5e-2}


def shapes(weights: str) -> list[tuple[int, int]]:
    """Returns the rows and tokens for which there is a kernel."""
    kind = "bfloat16_columns" if weights == "matrices in bfloat16" else weights
    if WEIGHTS[weights] is None and weights != "int8":
        most = kernels.most_rows(kind)
    else:
        most = {8: 64, 16: 128}.get(available.lanes(), 16)
    return [shape for shape in SHAPES if math.prod(shape) <= most]


def takes(weights: str) -> bool:
    """Returns whether this processor has a kernel for such weights."""
    if weights == "int8":
        return kernels.takes_rounded(1, jnp.zeros((16, 16), jnp.int8))
    if weights == "rounded":
        return VNNI in available.byte_lanes()
    return True


@pytest.mark.parametrize(("name", "weights"), KINDS)
def test_numbers_are_those_of_the_layers_one_by_one(
    name: str, weights: str, monkeypatch: pytest.MonkeyPatch
):
    if not takes(weights):
        assert "specjax_layers" not in text_of(name, weights, 1, 1)
        return
    module, params = network(name, weights)
    taps = tuple(range(module.num_taps))
    run = program(module, taps)
    plain = WEIGHTS[weights] is None  # what else is multiplied is the same in every layout
    for rows, width in shapes(weights) if plain else sorted({*SHAPES[1::2]} & {*shapes(weights)}):
        cache = read(name, weights, rows)
        tokens = (jnp.arange(rows * width).reshape(rows, width) * 7) % 64
        mask = tree(width) if width in (5, 9) else None
        given = params, tokens, cache, mask
        assert "specjax_layers" in run.lower(*given).as_text()
        made = run(*given)
        with monkeypatch.context() as patched:
            apart(patched)
            wanted = program(module, taps)(*given)
        # Where sums differ in their last bit, they may be rounded to different numbers.
        bound = BOUNDS.get(weights, 3e-5)
        size = float(jnp.abs(wanted.features).max())
        features = (np.asarray(out.features, np.float32) for out in (made, wanted))
        np.testing.assert_allclose(*features, rtol=0, atol=bound * size)
        for ours, theirs, before in zip(
            jax.tree.leaves(made.cache), jax.tree.leaves(wanted.cache), jax.tree.leaves(cache),
            strict=True,
        ):  # fmt: skip
            if ours.ndim < 4:
                continue
            slot = jnp.arange(ours.shape[2]) - cache.length[:, None]
            staged = np.asarray((slot >= 0) & (slot < width))[:, None, :, None]
            size = float(jnp.abs(theirs).max())
            ours, theirs, before = (np.asarray(x, np.float32) for x in (ours, theirs, before))
            np.testing.assert_allclose(
                np.where(staged, ours, 0), np.where(staged, theirs, 0), rtol=0, atol=bound * size
            )
            assert np.array_equal(np.where(staged, 0, ours), np.where(staged, 0, before))


@pytest.mark.parametrize("name", CONFIGS)
def test_in_bfloat16_it_errs_as_little_as_the_layers_one_by_one(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    module, params = network(name, "bfloat16")
    tokens, cache = (jnp.arange(15).reshape(3, 5) * 11) % 64, read(name, "bfloat16", 3)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (params, cache.keys, cache.values))
    exact = dataclasses.replace(cache, keys=wide[1], values=wide[2])
    made = program(module)(params, tokens, cache, None).logits
    apart(monkeypatch)
    other = program(module)(params, tokens, cache, None).logits
    truth = program(module)(wide[0], tokens, exact, None).logits
    ours, theirs = (
        float(jnp.sqrt(jnp.mean((x.astype(jnp.float32) - truth) ** 2))) for x in (made, other)
    )
    assert 0 < ours < 1.2 * theirs


@pytest.mark.parametrize("name", CONFIGS)
def test_matrices_in_bfloat16_give_the_bits_of_the_same_numbers_in_float32(name: str):
    """Of few rows and of prompts."""
    params, run = network(name, "matrices in bfloat16")[1], known(name, "matrices in bfloat16")
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    for rows, width in [*SHAPES, (1, 8), (2, 20), (1, 30)]:
        cache = read(name, "matrices in bfloat16", rows)
        tokens = (jnp.arange(rows * width).reshape(rows, width) * 7) % 64
        given = run.lower(params, tokens, cache, None).as_text()
        assert "specjax_layers_bfloat16_columns" in given
        ours, theirs = (run(held, tokens, cache, None) for held in (params, wide))
        np.testing.assert_array_equal(ours.logits, theirs.logits)
        for made, expected in zip(ours.cache.keys, theirs.cache.keys, strict=True):
            np.testing.assert_array_equal(made, expected)


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "matrices in bfloat16"])
@pytest.mark.parametrize("machine", [Machine(4, 32), Machine(8, 16), Machine(16, 32)])
def test_the_kernel_for_other_processors_is_right(
    machine: Machine, weights: str, monkeypatch: pytest.MonkeyPatch
):
    """Their vectors are cut into those of this one."""
    made = available.made
    register = functools.cache(lambda form, name: calling.register(Layers(form, machine), name))

    def registered(kind: str, dtype: str, *others: Any) -> str | None:
        if kind != "layers":
            return made(kind, dtype, *others)
        (form,) = others
        return register(form, f"test_layers_{machine.name}_{form.name}")

    monkeypatch.setattr(available, "made", registered)
    for name in ("biased", "capped"):
        module, params = network(name, weights)
        given = params, jnp.arange(10).reshape(2, 5), read(name, weights, 2), tree(5)
        assert f"test_layers_{machine.name}" in program(module).lower(*given).as_text()
        ours = program(module)(*given).logits
        with monkeypatch.context() as patched:
            apart(patched)
            theirs = program(module)(*given).logits
        size, bound = float(jnp.abs(theirs).max()), BOUNDS.get(weights, 3e-5)
        both = (np.asarray(x, np.float32) for x in (ours, theirs))
        np.testing.assert_allclose(*both, rtol=0, atol=bound * size)


@pytest.mark.parametrize(("name", "weights"), FEWER)
def test_the_bits_of_a_token_depend_on_its_row_alone(name: str, weights: str):
    """A row among others, and a token after the ones before it, have the bits that they have
    alone."""
    if not takes(weights):
        return  # the test above says that the kernel is not used
    params, run = network(name, weights)[1], known(name, weights)
    cache = read(name, weights, 3)
    tokens = (jnp.arange(15).reshape(3, 5) * 11) % 64
    together = run(params, tokens, cache, None)
    alone = jax.tree.map(lambda leaf: leaf[1:2], (tokens, cache))
    one = run(params, *alone, None)
    assert np.array_equal(one.logits[0], together.logits[1])
    one_by_one = []
    for i in range(5):
        out = run(params, alone[0][:, i : i + 1], alone[1], None)
        alone = alone[0], out.cache.commit(jnp.ones(1, jnp.int32))
        one_by_one.append(out.logits[0, 0])
    assert np.array_equal(jnp.stack(one_by_one), one.logits[0])


def test_of_the_last_layer_a_prompt_computes_what_is_read():
    """Whoever reads a prompt mostly wants keys and values, not what follows from the last ones."""
    module, params = network("plain")

    def products(wanted: Callable[[Any], Any], width: int) -> int:
        run = jax.jit(lambda *given: wanted(program(module)(*given)))
        tokens = jnp.ones((1, width), jnp.int32)
        text = run.lower(params, tokens, read("plain", "float32", 1), None).compile().as_text()
        return text.count(" dot(") + text.count("custom-call(")

    def keys(out: Any) -> Any:
        return out.cache.keys, out.cache.values

    def both(out: Any) -> Any:
        return out.logits, keys(out)

    assert products(both, 70) - products(keys, 70) == 2  # the last layer, the head
    assert products(both, 5) - products(keys, 5) == 1  # the head


@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_padding_of_one_row_is_not_computed(name: str, weights: str):
    """The tokens before it have the bits that they have without it; its keys are not written, but
    by XLA in the last layer."""
    if not takes(weights):
        return  # the first test says that the kernel is not used
    module, params = network(name, weights)
    cache, count, width = read(name, weights, 1), 9, 20
    tokens = (jnp.arange(width)[None] * 11) % 64

    @jax.jit
    def run(tokens: jax.Array, mask: Any = None) -> Any:
        positions = cache.length[:, None] + places(tokens.shape[1], jnp.array([count]))
        taps = tuple(range(module.config.num_layers + 1))
        return module.apply({"params": params}, tokens, positions, cache, mask, taps)

    padded, bare = run(tokens), run(tokens[:, :count])
    assert np.array_equal(padded.features[:, :count], bare.features)
    assert np.isfinite(padded.logits).all()
    end = int(cache.length[0]) + count
    for ours, wanted in zip(padded.cache.keys[:-1], bare.cache.keys, strict=False):
        assert np.array_equal(ours[0, :, :end], wanted[0, :, :end])
    if "specjax_layers" in run.lower(tokens).as_text():
        for ours, before in zip(padded.cache.keys[:-1], cache.keys, strict=False):
            assert np.array_equal(ours[0, :, end:], before[0, :, end:])
    # Nodes of a tree may share a position, so with a mask all are computed.
    seen = jnp.tril(jnp.ones((1, width, width), bool))
    few = run(tokens[:, : count + 1], seen[:, : count + 1, : count + 1])
    assert np.array_equal(run(tokens, seen).features[:, : count + 1], few.features)


def in_pages(cache: KVCache, page: int) -> PagedCache:
    """The same cache in pages, in no order; some pages are nobody's, and page 0 holds zeros."""
    rows, each = len(cache.length), -(-cache.capacity // page)
    table = 1 + np.random.default_rng(0).permutation(rows * each + 2)[: rows * each]
    table = table.reshape(rows, each).astype(np.int32)
    beyond = (0, 0), (0, 0), (0, each * page - cache.capacity), (0, 0)

    def pool(leaf: jax.Array) -> jax.Array:
        parts = np.pad(np.asarray(leaf), beyond, constant_values=7.0)
        parts = parts.reshape(rows, leaf.shape[1], each, page, leaf.shape[3]).swapaxes(1, 2)
        made = np.full((rows * each + 3, *parts.shape[2:]), 5.0, parts.dtype)
        made[0], made[table] = 0.0, parts
        return jnp.asarray(made)

    keys, values = (tuple(map(pool, leaves)) for leaves in (cache.keys, cache.values))
    return PagedCache(keys, values, cache.length, table=jnp.asarray(table), page=page)


@pytest.mark.parametrize(("name", "weights", "page"), PAGED)
def test_pages_have_the_bits_of_slots(name: str, weights: str, page: int):
    """Of a prompt too, where XLA attends in the last layer, keys and values have."""
    if not takes(weights):
        return  # the first test says that the kernel is not used
    params, run = network(name, weights)[1], known(name, weights)
    for rows, width in sorted({(3, 1), (2, 9), (1, 70)} & {*shapes(weights)}):
        cache = read(name, weights, rows)
        tokens = (jnp.arange(rows * width).reshape(rows, width) * 7) % 64
        mask = tree(width) if width == 9 else None
        pages = in_pages(cache, page)
        assert "specjax_layers" in run.lower(params, tokens, pages, mask).as_text()
        wanted, made = (run(params, tokens, held, mask) for held in (cache, pages))
        if width <= kernels.MOST_TOKENS:
            assert np.array_equal(made.logits, wanted.logits)
        kept = in_pages(dataclasses.replace(cache, keys=wanted.cache.keys), page)
        for ours, theirs in zip(made.cache.keys, kept.keys, strict=True):
            assert np.array_equal(ours, theirs)  # also pages of nobody, and the page 0


@pytest.mark.parametrize("slot", [30, 31, 32, 64])  # of the first token; the second page is gone
def test_what_has_no_page_is_dropped(slot: int):
    module, params = network("plain")
    pages = in_pages(read("plain", "float32", 2), 32)
    table, length = np.array(pages.table), np.array(pages.length)
    table[0, 1], length[0] = 0, slot
    table = table[:, :2]
    pages = dataclasses.replace(pages, table=jnp.asarray(table), length=jnp.asarray(length))
    tokens = jnp.arange(8).reshape(2, 4)
    made = program(module)(params, tokens, pages, None)
    other = jax.tree.map(lambda x: x[1:], (table, length))
    alone = dataclasses.replace(pages, table=other[0], length=other[1])
    assert np.array_equal(
        made.logits[1], program(module)(params, tokens[1:], alone, None).logits[0]
    )
    assert np.isfinite(made.logits).all()
    for before, after in zip(pages.keys, made.cache.keys, strict=True):
        changed = (np.asarray(before) != np.asarray(after)).any((1, 3))
        wanted = np.zeros_like(changed)
        wanted[table[0, 0], slot : slot + 4] = slot < 32
        for place in range(length[1], length[1] + 4):
            wanted[table[1, place // 32], place % 32] = True
        assert np.array_equal(changed, wanted)


def test_a_row_at_the_end_of_its_slots_writes_within_them():
    module, params = network("plain")
    cache = read("plain", "float32", 2)
    end = dataclasses.replace(cache, length=jnp.asarray([cache.capacity, 2], jnp.int32))
    out = program(module)(params, jnp.ones((2, 4), jnp.int32), end, None)
    alone = program(module)(
        params, jnp.ones((1, 4), jnp.int32), jax.tree.map(lambda x: x[1:], end), None
    )
    assert np.array_equal(out.logits[1], alone.logits[0])
    for ours, before in zip(out.cache.keys, cache.keys, strict=True):
        assert np.array_equal(ours[0, :, :-4], before[0, :, :-4])


def test_positions_of_all_rows_are_those_of_each():
    module, params = network("plain")
    cache, tokens = read("plain", "float32", 3), jnp.arange(12).reshape(3, 4)

    @jax.jit
    def run(positions: jax.Array) -> jax.Array:
        return module.apply({"params": params}, tokens, positions, cache).logits

    of_all = jnp.arange(4)[None] + 20
    assert "specjax_layers" in run.lower(of_all).as_text()
    assert np.array_equal(run(of_all), run(jnp.repeat(of_all, 3, axis=0)))


def test_derivatives_are_those_of_the_layers_one_by_one(monkeypatch: pytest.MonkeyPatch):
    module, params = network("biased")
    cache = read("biased", "float32", 2)
    tokens = jnp.arange(6).reshape(2, 3)

    def slope() -> Any:
        def loss(params: Any) -> jax.Array:
            positions = cache.next_positions(3)
            return jnp.sin(module.apply({"params": params}, tokens, positions, cache).logits).sum()

        return jax.jit(jax.grad(loss))(params)

    ours = slope()
    with monkeypatch.context() as patched:
        apart(patched)
        theirs = slope()
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        scale = max(float(jnp.abs(other).max()), 1e-3)
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-4 * scale)


def test_several_programs_at_once_give_the_same_bits():
    """Parts wait for parts of other threads, and all programs share XLA's threads."""
    module, params = network("plain")
    run, cases = program(module), []
    for rows, width in SHAPES:
        given = jnp.ones((rows, width), jnp.int32), read("plain", "float32", rows), None
        cases.append((given, np.asarray(run(params, *given).logits)))

    def again(i: int) -> bool:
        given, wanted = cases[i % len(cases)]
        return np.array_equal(run(params, *given).logits, wanted)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert all(pool.map(again, range(200)))


@pytest.mark.parametrize("normed", [False, True])
def test_a_head_of_one_layer_runs_as_a_whole(normed: bool, monkeypatch: pytest.MonkeyPatch):
    """Its attention reads twice the numbers of the stream, and the stream may be a norm."""
    layers = dataclasses.replace(CONFIGS["biased"], num_layers=1)
    config = eagle3.Eagle3Config(layers, 1, 48, norm_before_residual=normed, attend=cpu_attend)
    head = eagle3.Eagle3(config, cpu_dot_general)
    token, number = jnp.ones((1, 1, 48)), jnp.ones((1, 1), jnp.int32)
    boxed = head.init(jax.random.key(0), token, token, number, method="everything")["params"]
    params = jax.tree.map(lambda leaf: leaf.unbox(), boxed, is_leaf=lambda x: hasattr(x, "unbox"))
    params = jax.tree.map(lambda x: x + 0.2 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), params)
    embedded, features = jax.random.normal(jax.random.key(1), (2, 2, 5, 48))
    cache = head.init_cache(2, 40, jnp.float32)
    cache = dataclasses.replace(cache, length=jnp.asarray([0, 7], jnp.int32))
    given = params, embedded, features, cache, tree(5)

    def run() -> tuple[Any, str]:
        def read(params: Any, embedded: Any, features: Any, cache: Any, mask: Any) -> Any:
            positions = cache.next_positions(5)
            return head.apply({"params": params}, embedded, features, positions, cache, mask)

        program = jax.jit(read)
        return program(*given), program.lower(*given).as_text()

    ours, text = run()
    assert "specjax_layers" in text
    monkeypatch.setattr(eagle3, "form_of_layers", lambda *of, **how: None)
    theirs, text = run()
    assert "specjax_layers" not in text
    for mine, other in zip(jax.tree.leaves(ours[:2]), jax.tree.leaves(theirs[:2]), strict=True):
        scale = float(jnp.abs(other).max())
        np.testing.assert_allclose(mine, other, rtol=0, atol=3e-5 * scale)


OTHERS = {
    "interleaved": {"interleaved": True},
    "output gate": {"output_gate": True},
    "layer norm": {"norm": "layer"},
    "post norms": {"norm_order": "sandwich"},
    "biases of MLPs": {"mlp_bias": True},
    "sinks": {"sinks": True},
    "windows of some layers": {"windows": (9, None, 9)},
    "norms after the rope": {"qk_norm": "head", "qk_norm_last": True},
    "without a gate": {"gated": False},
    "other activations": {"activation": "relu"},
    "columns that are no multiple of 16": {"mlp_size": 72},
    "experts": {"num_experts": 4, "expert_size": 16},
    "scales": {"branch_scale": 0.5},
}


@pytest.mark.parametrize("change", OTHERS)
def test_layers_of_other_kinds_run_one_by_one(change: str):
    config = dataclasses.replace(SMALL, **OTHERS[change])
    module = Transformer(config, dot_general=cpu_dot_general, attend=cpu_attend)
    tokens = jnp.ones((1, 2), jnp.int32)

    def run(key: Any) -> Any:
        cache = module.init_cache(1, 40, jnp.float32)
        params = module.init(key, tokens, tokens)["params"]
        return module.apply({"params": params}, tokens, tokens, cache).logits

    assert "specjax_layers" not in jax.jit(run).lower(jax.random.key(0)).as_text()


def test_bfloat16_many_rows_and_other_platforms_take_other_forms(monkeypatch: pytest.MonkeyPatch):
    module, params = network("plain")
    cache = read("plain", "float32", 1)

    def text(rows: int, width: int, params: Any = params, cache: Any = cache, **how: Any) -> str:
        tokens = jnp.ones((rows, width), jnp.int32)
        cache = jax.tree.map(lambda x: jnp.repeat(x, rows, axis=0), cache)
        return program(module).trace(params, tokens, cache, None).lower(**how).as_text()

    assert "specjax_layers" in text(1, 2)
    assert "specjax" not in text(1, 2, lowering_platforms=("tpu",))
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    assert "specjax_layers" not in text(1, 2, narrow)
    most = kernels.most_rows("float32")
    monkeypatch.setattr(layer_calls, "processors", lambda: 64)
    assert "specjax_layers" in text(most, 1)
    assert "specjax_layers" not in text(most + 1, 1)


def test_without_the_kernel_the_layers_run_one_by_one(monkeypatch: pytest.MonkeyPatch):
    module, params = network("plain")
    given = params, jnp.ones((1, 2), jnp.int32), read("plain", "float32", 1), None
    with monkeypatch.context() as patched:
        patched.setattr(available, "made", lambda *kind: None)
        text = program(module).lower(*given).as_text()
    assert "specjax_layers" not in text
    with pytest.raises(ValueError, match="no kernel of layers in float32"):
        monkeypatch.setattr(available, "made", lambda *kind: None)
        form, empty = kernels.LayersForm("float32", 32), jnp.zeros((1, 1, 48))
        seen, start = jnp.ones((1, 1, 8), bool), jnp.zeros(1, jnp.int32)
        layer_calls.whole_layers(
            form, empty, empty, (empty, empty), seen, start, [], 4, (1.0, 0.0, 1e-5, 0.0)
        )
