"""Layers that read the keys and values of others, and tables of embeddings in each layer."""

import json

import folders
import jax
import jax.numpy as jnp
import lora_folders
import numpy as np
import pytest
import small_families

import specjax

pytestmark = pytest.mark.xdist_group("shared layers")  # a share takes all of them, or none

E2B, ALL = "gemma4_text, as E2B", "gemma4_text, all of it"


def rewritten(folder, case, **tensors):
    """The folder of a case with more tensors."""
    source = small_families.folder(case)
    config = json.loads((source / "config.json").read_text())
    folders.Llama(config, {**lora_folders.tensors(source), **tensors}).save_pretrained(folder)
    return folder


def test_only_owners_have_a_cache():
    """Layers 0 to 4 slide in turn, and the last three read what layers 0 and 1 keep."""
    model = specjax.load(small_families.folder(E2B)).model
    config = model.module.config
    assert [config.owner_of(i) for i in range(5)] == [0, 1, 0, 1, 1]
    cache = model.init_cache(3, 50)
    assert [x.shape for x in cache.keys] == [(3, 2, 51, 8), (3, 2, 51, 16)]
    assert cache.windows == (9, None)


def test_keys_that_nothing_reads(tmp_path):
    """Published files hold projections for layers that share keys; others are refused."""
    name = "model.layers.4.self_attn.{}.weight"
    more = {name.format(part): np.ones((3, 4), np.float32) for part in ("k_proj", "v_proj")}
    plain = specjax.load(small_families.folder(E2B))
    loaded = specjax.load(rewritten(tmp_path / "more", E2B, **more))
    jax.tree.map(np.testing.assert_array_equal, loaded.params, plain.params)
    other = {name.format("s_proj"): np.ones((3, 4), np.float32)}
    with pytest.raises(ValueError, match=r"layers\.4\.self_attn\.s_proj\.weight is not a tensor"):
        specjax.load(rewritten(tmp_path / "other", E2B, **other))


@pytest.mark.parametrize("layers", [[0, 1, 2], [1, 0, 4, 3]])
def test_some_layers(layers):
    """They have their own parts of the tables, and their logits follow from their weights."""
    folder = small_families.folder(E2B)
    whole, some = specjax.load(folder), specjax.load(folder, layers=layers)
    for new, old in enumerate(layers):
        jax.tree.map(
            np.testing.assert_array_equal,
            some.params[f"layer_{new}"],
            whole.params[f"layer_{old}"],
        )
    specjax.models.check_model(some.model, some.params, tolerance=1e-4)


def test_the_first_layers_read_the_same():
    """Whatever layers come after them."""
    folder, tokens = small_families.folder(E2B), small_families.text()[:, :30]
    whole, first = specjax.load(folder), specjax.load(folder, layers=[0, 1, 2, 3])

    def after(loaded):
        read = jax.jit(lambda p: loaded.model.apply(p, tokens, jnp.arange(30)[None], taps=(4,)))
        return read(loaded.params).features

    np.testing.assert_array_equal(after(whole), after(first))


def test_a_layer_without_its_owner():
    with pytest.raises(ValueError, match="layer 0 of 2 reads keys and values of an earlier layer"):
        specjax.load(small_families.folder(E2B), layers=[2, 1])


def test_layers_that_no_file_describes(tmp_path):
    """transformers takes the last layer for one of full attention, whatever its file says."""
    some = specjax.load(small_families.folder(E2B), layers=[0, 1, 2])
    with pytest.raises(ValueError, match=r"no config\.json of gemma4_text describes these 3"):
        specjax.save(some, tmp_path)


@pytest.mark.parametrize("case", [E2B, ALL])
def test_both_forms_of_a_file(case):
    """Publishers name the sizes of full attention, and transformers 5 lists them by layer."""
    listed = json.loads((small_families.folder(case) / "config.json").read_text())
    sizes = listed.pop("per_layer_config")["1"]
    named = {
        **listed,
        "global_head_dim": sizes["head_dim"],
        "num_global_key_value_heads": sizes.get("num_key_value_heads"),
    }
    read = specjax.FAMILIES["gemma4_text"].read_config
    listed["per_layer_config"] = {str(i): sizes for i in range(1, len(listed["layer_types"]), 2)}
    last = len(listed["layer_types"]) - 1
    listed["per_layer_config"][str(last)] = sizes
    assert read(listed) == read(named)
    assert read(listed) != read({**named, "global_head_dim": 2 * sizes["head_dim"]})


def test_all_tables_and_scales_count():
    """Logits depend on each layer's table and scale, and on the norm that the tables share."""
    loaded = specjax.load(small_families.folder(E2B))
    tokens = small_families.text()[:, :20]
    read = jax.jit(lambda p: loaded.model.apply(p, tokens, jnp.arange(20)[None]).logits)
    plain = read(loaded.params)
    paths = [
        *[(f"layer_{i}", "per_layer", "embedding") for i in range(5)],
        *[(f"layer_{i}", "scale") for i in range(4)],  # a norm follows the last one
        ("per_layer_norm",),
    ]
    for path in paths:
        params = jax.tree.map(lambda x: x, loaded.params)
        place = params
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = place[path[-1]] * 1.5
        assert np.abs(read(params) - plain).max() > 1e-3, path
