"""Small networks whose layers have a kernel, and the laws of that kernel.

`CONFIGS` has the forms of layers, and `WEIGHTS` those of weights.  `read` makes a cache whose rows
have read prompts of different lengths.
"""

from __future__ import annotations

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
from specjax.caches import KVCache, PagedCache
from specjax.kernels import available
from specjax.kernels.coding import VNNI
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
        most = {8: 64 if weights == "int8" else 512, 16: 128}.get(available.lanes(), 16)
    return [shape for shape in SHAPES if math.prod(shape) <= most]


def takes(weights: str) -> bool:
    """Returns whether this processor has a kernel for such weights."""
    return weights != "rounded" or VNNI in available.byte_lanes()


def numbers_agree(name: str, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are those of the layers one by one, whose cache is written in the same slots."""
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


def bits_depend_on_the_row_alone(name: str, weights: str) -> None:
    """A row among others, and a token after the ones before it, have the bits that they have
    alone."""
    if not takes(weights):
        return  # `numbers_agree` says that the kernel is not used
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


def pages_have_the_bits_of_slots(name: str, weights: str, page: int) -> None:
    """For a prompt, where XLA attends in the last layer, keys and values have the same bits."""
    if not takes(weights):
        return  # `numbers_agree` says that the kernel is not used
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
