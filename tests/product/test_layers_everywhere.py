"""The kernel of whole layers with every form of layers and of weights; `tests/core` has some."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import layer_networks as networks
import numpy as np
import pytest
from layer_networks import (
    BOUNDS,
    CONFIGS,
    SHAPES,
    WEIGHTS,
    apart,
    known,
    network,
    program,
    read,
    takes,
    tree,
)

from specjax.caches import places
from specjax.kernels import available, calling
from specjax.kernels.forms import Machine
from specjax.kernels.layering import Layers
from specjax.methods.eagle3 import network as eagle3
from specjax.models import cpu_attend, cpu_dot_general

KINDS = [(name, weights) for name in CONFIGS for weights in ("float32", "int8", "bfloat16")]
KINDS += [("plain", weights) for weights, coded in WEIGHTS.items() if coded]
KINDS += [("biased", "codes"), ("plain", "matrices in bfloat16")]
FEWER = [kind for kind in KINDS if kind[1] != "codes of 4 bits" and kind != ("biased", "codes")]
# Pages are found in the same way in every dtype: only float32 is tried with each size of page.
PAGED = [(*kind, page) for kind in KINDS for page in (16, 48, 128)]
PAGED = [kind for kind in PAGED if kind[1] == "float32" or kind[2] == 48]


def grouped(cases: list[tuple[Any, ...]]) -> list[Any]:
    """Returns cases of which a share takes all of a network, or none."""
    group = pytest.mark.xdist_group
    return [pytest.param(*case, marks=group(f"layers-{case[0]}-{case[1]}")) for case in cases]


@pytest.mark.parametrize(("name", "weights"), grouped(KINDS))
def test_numbers_are_those_of_the_layers_one_by_one(
    name: str, weights: str, monkeypatch: pytest.MonkeyPatch
):
    networks.numbers_agree(name, weights, monkeypatch)


@pytest.mark.parametrize(("name", "weights"), grouped(FEWER))
def test_the_bits_of_a_token_depend_on_its_row_alone(name: str, weights: str):
    networks.bits_depend_on_the_row_alone(name, weights)


@pytest.mark.parametrize(("name", "weights", "page"), grouped(PAGED))
def test_pages_have_the_bits_of_slots(name: str, weights: str, page: int):
    networks.pages_have_the_bits_of_slots(name, weights, page)


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


@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_padding_of_one_row_is_not_computed(name: str, weights: str):
    """The tokens before it have the bits that they have without it; its keys are not written, but
    by XLA in the last layer."""
    if not takes(weights):
        return  # `numbers_agree` says that the kernel is not used
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
