"""The kernel that adds a product to the residual stream and norms it on a GPU, and a transformer
with all kernels for a GPU; computed on this machine."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import kernels
from specjax._internal.platforms import shapes_for
from specjax.models import (
    LinenModel,
    Transformer,
    TransformerConfig,
    attend,
    attention,
    gpu_attend,
    layers,
)
from specjax.models.layers import Pending

pytestmark = pytest.mark.xdist_group("gpu norms")  # a share takes all of them, or none

EPS = 1e-5


@pytest.mark.parametrize(("size", "offset"), [(256, 0.0), (96, 1.0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sum_and_its_norm(size, offset, dtype):
    """They are those of the form for other platforms; a row alone has the same bits."""
    rng = np.random.default_rng(0)
    stream = jnp.asarray(rng.standard_normal((2, 3, size)), dtype)
    parts = jnp.asarray(rng.standard_normal((4, 2, 3, size)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal(size), dtype)
    kernel = functools.partial(kernels.summed_norm_on_gpu, eps=EPS, offset=offset, interpret=True)
    summed, normed = jax.jit(kernel)(stream, parts, weight)
    wanted = layers._sum_then_norm(Pending(stream, parts), weight, EPS, offset)
    accuracy = 2e-6 if dtype == "float32" else 2e-2
    for found, other in zip((summed, normed), wanted, strict=True):
        assert found.dtype == stream.dtype
        found, other = (np.asarray(x, np.float32) for x in (found, other))
        np.testing.assert_allclose(found, other, rtol=accuracy, atol=accuracy)
    alone = jax.jit(kernel)(stream[1:, 2:], parts[:, 1:, 2:], weight)
    np.testing.assert_array_equal(np.asarray(alone[1])[0, 0], np.asarray(normed)[1, 2])


def test_parts_of_products():
    assert [kernels.parts_of_products(n) for n in (96, 512, 768, 2048, 8192, 14336)] == [
        1, 2, 2, 8, 16, 16,
    ]  # fmt: skip


CONFIG = TransformerConfig(
    vocab_size=64, hidden_size=64, mlp_size=512, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=16, max_positions=256, tied_embeddings=False,
)  # fmt: skip


@pytest.fixture
def on_this_machine(monkeypatch):
    """Programs of this process take the forms for an NVIDIA GPU, whose kernels are interpreted."""
    for module in (attention, layers):
        monkeypatch.setattr(module, "on_cuda", lambda cuda, other, *operands: cuda(*operands))
    for name in ("few_queries_on_gpu", "summed_norm_on_gpu"):
        kernel = functools.partial(getattr(kernels, name), interpret=True)
        monkeypatch.setattr(kernels, name, kernel, raising=False)
    jax.clear_caches()
    with shapes_for("gpu"):
        yield
    jax.clear_caches()


@pytest.mark.parametrize("kind", ["one", "chain", "tree"])
def test_a_transformer_of_kernels(kind, on_this_machine):
    """Its numbers, inner layers and caches are those of the one for other platforms."""
    plain, ours = (LinenModel(Transformer(CONFIG, attend=form)) for form in (attend, gpu_attend))
    assert ours.triton and not plain.triton
    params = plain.init(jax.random.key(0))
    rows, width = (1, 1) if kind == "one" else (2, 4)
    tokens = jnp.arange(rows * 9).reshape(rows, 9) % 60
    parents = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], bool)
    mask = jnp.asarray(np.broadcast_to(parents, (rows, 4, 4))) if kind == "tree" else None
    depth = mask.sum(-1) - 1 if mask is not None else jnp.arange(width)[None]

    def decode(model: LinenModel, params):
        cache = model.init_cache(rows, 100)
        positions = jnp.broadcast_to(jnp.arange(9), (rows, 9))
        staged = plain.apply(params, tokens, positions, cache).staged
        cache = staged.commit(jnp.array([9, 7])[:rows])
        positions = cache.length[:, None] + depth
        return model.apply(params, tokens[:, :width], positions, cache, mask, (0, 1, 3, 4))

    made, wanted = (jax.jit(functools.partial(decode, model))(params) for model in (ours, plain))
    text = str(jax.make_jaxpr(functools.partial(decode, ours))(params))
    assert text.count("name=few_queries") >= 2 and text.count("name=summed_norm") >= 2
    for found, other in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
        if found.ndim == 4 and kind == "one":  # a token alone is read twice, into the spare slot
            found, other = found[:, :, :10], other[:, :, :10]
        np.testing.assert_allclose(np.asarray(found), np.asarray(other), rtol=0, atol=5e-6)
