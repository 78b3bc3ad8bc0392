"""The kernel of whole layers beside the layers one by one.

`tests/product/test_layers_everywhere.py` has all forms of layers and of weights.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import layer_networks as networks
import numpy as np
import pytest
from flax import linen as nn
from layer_networks import SHAPES, SMALL, in_pages, network, program, read

from specjax import kernels
from specjax.kernels import available, layer_calls
from specjax.methods.eagle3 import Eagle3Config
from specjax.models import Transformer, cpu_attend, cpu_dot_general

KINDS = [("plain", "float32"), ("biased", "int8"), ("capped", "bfloat16"), ("plain", "codes")]
"""Three forms of layers, and four of weights."""


@pytest.mark.parametrize(("name", "weights"), KINDS)
def test_numbers_are_those_of_the_layers_one_by_one(
    name: str, weights: str, monkeypatch: pytest.MonkeyPatch
):
    networks.numbers_agree(name, weights, monkeypatch)


@pytest.mark.parametrize(("name", "weights"), KINDS)
def test_the_bits_of_a_token_depend_on_its_row_alone(name: str, weights: str):
    networks.bits_depend_on_the_row_alone(name, weights)


def test_pages_have_the_bits_of_slots():
    networks.pages_have_the_bits_of_slots("biased", "float32", 48)


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


def test_of_an_eagle3_head_a_prompt_computes_keys_and_values_alone():
    """They are those that passes over fewer pairs write, which run the layer as a whole."""
    layers, size = dataclasses.replace(SMALL, num_layers=1), SMALL.hidden_size
    products: Any = dict(attend=cpu_attend, dot_general=cpu_dot_general)
    module = Eagle3Config(layers, 1, size, fuses=False, **products).network()
    embedded, features = jax.random.normal(jax.random.key(0), (2, 1, 70, size))
    places = jnp.arange(70)[None]
    params = nn.meta.unbox(module.init(jax.random.key(1), embedded, features, places))
    cache = module.init_cache(1, 80, jnp.float32)

    def keys_and_values(embedded: jax.Array, features: jax.Array, places: jax.Array) -> Any:
        staged = module.apply(params, embedded, features, places, cache)[-1]
        return staged.keys, staged.values

    pairs = embedded, features, places
    run, first = jax.jit(keys_and_values), [x[:, :8] for x in pairs]
    assert "specjax_layers" not in run.lower(*pairs).compile().as_text()
    assert "specjax_layers" in run.lower(*first).compile().as_text()
    for many, few in zip(run(*pairs), run(*first), strict=True):
        many, few = np.asarray(many)[..., :8, :], np.asarray(few)[..., :8, :]
        assert np.abs(few).min() > 0
        np.testing.assert_allclose(many, few, rtol=1e-5, atol=1e-5)


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
