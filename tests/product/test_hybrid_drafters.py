"""Drafters on targets with recurrent layers, latent attention and experts: one key, one text.

The drafters have random weights, and the forms of those that are published for such targets: heads
of EAGLE-3 for gpt-oss, one of which reads only its last state, DSpark for Kimi, DFlash for Qwen3.5.
"""

from __future__ import annotations

import dataclasses
import functools
import json

import eagle3_folders
import jax
import jax.numpy as jnp
import numpy as np
import published
import pytest
from eagle3_folders import SIZE, VOCAB, Head
from published_target import write_fixture
from small_targets import target

import specjax
from specjax import Datastore
from specjax.drafters.folder import load_drafter, open_drafter, save_drafter
from specjax.methods import FORMATS
from specjax.methods.eagle3.network import Eagle3
from specjax.proposers import BestFirst, Chain, DynamicTree, StaticTree

LAYERS = 5
SHAPES = {
    "chain": (Chain, {"num_drafts": 3}),
    "static tree": (StaticTree, {"branching": (2, 2, 1)}),
    "dynamic tree": (DynamicTree, {"depth": 3, "width": 2, "num_nodes": 8}),
}


def same_text(loaded, drafter, least=0.0, **options):
    """The text of a drafter is that of plain decoding, greedy and drawn; and its acceptance rate,
    at temperature 0, is at least `least`."""
    rng = np.random.default_rng(3)
    vocab = loaded.model.vocab_size
    prompts = [rng.integers(1, vocab, length).tolist() for length in (9, 1, 4)]
    for temperature in (0.0, 0.9):
        settings = {"max_new_tokens": 24, "temperature": temperature, "seed": 5, "eos": []}
        plain = specjax.generate(loaded, prompts, **settings)
        out = specjax.generate(loaded, prompts, drafter=drafter, **settings, **options)
        assert out.tokens == plain.tokens and out.exact
        if temperature == 0.0:
            assert out.stats.acceptance_rate >= least


@functools.cache
def sized(family):
    return target(family, SIZE, VOCAB, LAYERS)


def head(folder, of_last=False):
    """A head in NVIDIA's layout, of three layers of the target or of its last state."""
    made = Head(taps=(1, 2, 4))
    config, tensors = eagle3_folders.model_opt(made), made.tensors(midlayer=True)
    if of_last:
        config["eagle_config"] = {**config["eagle_config"], "use_aux_hidden_state": False}
        del tensors["fc.weight"]
    return eagle3_folders.write(folder, config, tensors)


@pytest.mark.parametrize("shape", ["chain", "dynamic tree"])
@pytest.mark.parametrize("of_last", [False, True])
def test_eagle3_heads_of_gpt_oss(of_last, shape, tmp_path):
    kind, numbers = SHAPES[shape]
    drafter = load_drafter(head(tmp_path, of_last), sized("gpt_oss"), kind, **numbers)
    assert drafter.source.taps == ((LAYERS + 1,) if of_last else (1, 2, 4))
    same_text(sized("gpt_oss"), drafter)


def test_the_last_state_is_the_feature(tmp_path):
    """A head without `fc` drafts what a head of that state does whose `fc` changes nothing."""
    loaded = sized("gpt_oss")
    made = load_drafter(head(tmp_path, True), loaded, Chain, num_drafts=3)
    fused = dataclasses.replace(made.source.network, fuses=True)
    source = dataclasses.replace(made.source, network=fused)
    network = {**made.params["network"], "fc": {"kernel": jnp.eye(SIZE)}}
    same = dataclasses.replace(
        made, source=source, proposer=Chain(source, 3), params={**made.params, "network": network}
    )
    settings = {"max_new_tokens": 24, "temperature": 0.9, "seed": 5, "eos": []}
    mine, other = (
        specjax.generate(loaded, [[3, 1, 4, 1, 5]], drafter=drafter, **settings)
        for drafter in (made, same)
    )
    assert mine.tokens == other.tokens
    assert mine.stats.accepted == other.stats.accepted > 0
    features = jax.random.normal(jax.random.key(2), (1, 7, SIZE))
    found = Eagle3(made.source.network).apply({"params": made.params["network"]}, features,
                                              method="fuse")  # fmt: skip
    np.testing.assert_array_equal(found, features)


def test_a_head_of_the_last_state_is_described_and_saved(tmp_path):
    """It names no layers without a target; a saved copy is read again; speculators has no such."""
    folder, loaded = head(tmp_path / "head", True), sized("gpt_oss")
    format, config, tensors = open_drafter(folder)
    assert FORMATS[format].describe(config, tensors, None).taps is None
    assert FORMATS[format].describe(config, tensors, loaded).taps == (LAYERS + 1,)
    drafter = load_drafter(folder, loaded)
    save_drafter(tmp_path / "saved", drafter, loaded, "official")
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert written["eagle_config"] == {"use_aux_hidden_state": False}
    again = load_drafter(tmp_path / "saved", loaded)
    assert again.source == drafter.source
    for one, other in zip(
        jax.tree.leaves(drafter.params), jax.tree.leaves(again.params), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="last state without fc"):
        save_drafter(tmp_path / "other", drafter, loaded, "speculators")


def test_a_head_of_the_last_state_needs_a_target_as_wide(tmp_path):
    wide = target("gpt_oss", 2 * SIZE, VOCAB, LAYERS)
    with pytest.raises(ValueError, match=r"use_aux_hidden_state=false.*hidden size is 96"):
        load_drafter(head(tmp_path, True), wide)


BLOCKS = {
    "DSpark of Kimi": ("kimi_k2", "dspark_vanilla"),
    "DFlash of Qwen3.5": ("qwen3_5_text", "dflash"),
    "DFlash of Qwen3.5 with experts": ("qwen3_5_moe_text", "dflash"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_block_drafts_of_published_forms(name, tmp_path):
    """As their folders ask for, and as a tree of the best paths."""
    family, fixture = BLOCKS[name]
    loaded = target(family, published.HIDDEN, published.VOCAB, published.LAYERS)
    folder = write_fixture(tmp_path, fixture)
    same_text(loaded, load_drafter(folder, loaded))
    same_text(loaded, load_drafter(folder, loaded, BestFirst, num_nodes=8))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_an_eagle3_head_of_a_hybrid(family, shape, tmp_path):
    kind, numbers = SHAPES[shape]
    same_text(sized(family), load_drafter(head(tmp_path), sized(family), kind, **numbers))


STORED = {"chain": {"num_drafts": 3}, "tree": {"branching": (2, 2, 1)}}


@pytest.mark.parametrize("shape", STORED)
def test_a_datastore_of_a_hybrid(shape):
    """It holds what the target writes, so that drafts are accepted."""
    loaded = sized("qwen3_5_text")
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, VOCAB, length).tolist() for length in (9, 1, 4)]
    plain = specjax.generate(loaded, prompts, max_new_tokens=24, temperature=0.0, eos=[])
    texts = [prompt + text for prompt, text in zip(prompts, plain.tokens, strict=True)]
    drafter = Datastore.build(texts, vocab_size=VOCAB).drafter(loaded, **STORED[shape])
    same_text(loaded, drafter, least=0.5)
