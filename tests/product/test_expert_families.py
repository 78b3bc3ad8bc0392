"""Families with experts: every small vector has a part in the logits, trees and chunks read the
same, and what stays in float32."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_families
from flax.traverse_util import flatten_dict, unflatten_dict

import specjax
from specjax import tree

CASES = tuple(small_families.GROUPS["experts"])
SMALL = ("sinks", "correction", "gate_bias", "up_bias", "down_bias", "bias")


@functools.cache
def loaded(case: str, dtype: str = "float32") -> specjax.LanguageModel:
    return specjax.load(small_families.folder(case), dtype)


@functools.cache
def reader(case: str):
    model = loaded(case).model
    return jax.jit(lambda params, *given: model.apply(params, *given))


@pytest.mark.parametrize("case", CASES)
def test_every_small_vector_changes_the_logits(case: str):
    """So equal logits show that each of them is read, and where.

    A bias of the keys adds one number to all scores of a query where no rope turns them, so there
    it changes nothing.
    """
    target, read = loaded(case), reader(case)
    tokens = small_families.text()
    positions = jnp.arange(tokens.shape[1])[None]
    wanted = np.asarray(read(target.params, tokens, positions).logits)
    leaves = flatten_dict(target.params)
    turned = target.model.module.config.rope_of
    names = [
        path
        for path in leaves
        if path[-1] in SMALL
        and (path[1:] != ("attention", "k", "bias") or turned(int(path[0].removeprefix("layer_"))))
    ]
    for path in names:
        changed = unflatten_dict({**leaves, path: jnp.zeros_like(leaves[path])})
        found = np.asarray(read(changed, tokens, positions).logits)
        assert np.abs(found - wanted).max() > 1e-4 * np.abs(wanted).max(), path
    assert names or not case.startswith(("glm4_moe", "gpt_oss", "minimax_m2", "ernie"))


@pytest.mark.parametrize("case", CASES)
def test_a_tree_reads_as_its_branches(case: str):
    """Behind a prompt that was read in two chunks."""
    target, read = loaded(case), reader(case)
    text, nodes = small_families.text()[:, :40], small_families.text()[:, 100:106]
    cache = target.model.init_cache(1, 60)
    for start in (0, 20):
        part = text[:, start : start + 20]
        out = read(target.params, part, jnp.arange(start, start + 20)[None], cache)
        cache = out.cache.commit(jnp.array([20]))
    parent = jnp.array([-1, 0, 0, 1, 3, 2])
    depth = tree.depth(parent)
    mask = tree.ancestor_mask(parent)[None]
    out = read(target.params, nodes, 40 + depth[None], cache, mask)
    for node in range(6):
        path = np.asarray(tree.path(parent, jnp.int32(node), 5))[: int(depth[node]) + 1]
        whole = np.concatenate([text, nodes[:, path]], axis=1)
        end = whole.shape[1]
        padded = np.pad(whole, ((0, 0), (0, 46 - end)))  # one shape, so one program
        wanted = read(target.params, padded, jnp.arange(46)[None]).logits[0, end - 1]
        scale = float(jnp.abs(wanted).max())
        np.testing.assert_allclose(out.logits[0, node], wanted, rtol=0, atol=2e-5 * scale)


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("qwen2")])
def test_a_corrected_router_stays_in_float32(case: str, tmp_path):
    """Corrections differ by less than bfloat16 resolves; a saved copy keeps them."""
    target = loaded(case, "bfloat16")
    specjax.save(target, tmp_path)
    corrected = target.model.module.config.router.corrected
    for model in (target, specjax.load(tmp_path, "bfloat16")):
        for path, leaf in flatten_dict(model.params).items():
            wide = corrected and (path[-1] == "correction" or "router" in path)
            assert leaf.dtype == (jnp.float32 if wide else jnp.bfloat16), path


@pytest.mark.parametrize("case", CASES)
def test_bfloat16(case: str):
    """At half of the positions the mean difference of the logits is below 5 % of their spread;
    at others a near tie of two experts may be decided otherwise."""
    target, tokens = loaded(case, "bfloat16"), small_families.text()
    places = np.array(small_families.PLACES)
    read = jax.jit(lambda params: target.model.apply(params, tokens, jnp.arange(200)[None]).logits)
    found = np.asarray(read(target.params), np.float32)[0, places]
    wanted = small_families.stored()[1][f"{case}: logits"]
    apart = np.sqrt(np.mean((found - wanted) ** 2, axis=-1))
    assert np.median(apart) < 0.05 * wanted.std()


@pytest.mark.parametrize(
    ("family", "sparse", "words"),
    [
        ("glm4_moe", (True, False), "can only say that the first layers have none"),
        ("ernie4_5_moe", (True, True, False, True), "every n-th layer of a range has some"),
    ],
)
def test_layers_that_files_cannot_describe_are_refused(family, sparse, words):
    """Instead of files that describe other layers."""
    case = next(case for case in CASES if case.startswith(family))
    config = loaded(case).model.module.config
    config = dataclasses.replace(config, num_layers=len(sparse), sparse=sparse)
    with pytest.raises(ValueError, match=words):
        specjax.FAMILIES[family].write_config(config)


def test_a_model_without_a_sparse_layer_can_be_described():
    case = next(case for case in CASES if case.startswith("ernie"))
    config = loaded(case).model.module.config.keep([0])
    family = specjax.FAMILIES["ernie4_5_moe"]
    assert config.sparse == (False,)
    assert family.read_config(family.write_config(config)) == config
