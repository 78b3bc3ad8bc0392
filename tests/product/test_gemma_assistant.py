"""Gemma 4's assistants beside transformers, and decoding with them."""

from __future__ import annotations

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest
import small_families
import torch
import transformers
from eagle3_driven import Greedy, driven
from gemma_assistants import BEST, CASES, CLUSTERS, folder
from safetensors.numpy import load_file, save_file

import specjax
from specjax import Chain, DynamicTree, StaticTree
from specjax.types import Block

TEXT = small_families.text()[0].tolist()
PROMPTS = [TEXT[:30], TEXT[40:47]]
PATH = (7, 3, 11)
NEW = 24


@functools.cache
def target(name: str) -> specjax.LanguageModel:
    return specjax.load(small_families.folder(CASES[name][0]))


@functools.cache
def theirs(name: str) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedModel]:
    main = transformers.AutoModelForCausalLM.from_pretrained(
        small_families.folder(CASES[name][0]), dtype=torch.float32
    )
    prefix = "Gemma4Unified" if "unified" in CASES[name][0] else "Gemma4"
    kind = getattr(transformers, f"{prefix}AssistantForCausalLM")
    return main.eval(), kind.from_pretrained(folder(name), dtype=torch.float32).eval()


@torch.no_grad()
def wanted(name: str, text: list[int], path: tuple[int, ...]) -> np.ndarray:
    """[V] after a text, whose last token is pending, and the drafts of a path below it."""
    main, assistant = theirs(name)
    out = main(torch.tensor([text[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
    window = main.config.get_text_config().sliding_window
    cut = {"sliding_attention": slice(-window, None), "full_attention": slice(None)}
    shared = {
        kind: tuple(x[:, :, cut[kind]] for x in pair) for kind, pair in out.shared_kv_states.items()
    }
    hidden, position = out.hidden_states[-1][:, -1:], torch.tensor([[len(text) - 1]])
    for token in (text[-1], *path):
        embedded = main.get_input_embeddings()(torch.tensor([[token]]))
        found = assistant(
            inputs_embeds=torch.cat([embedded, hidden], -1), position_ids=position,
            shared_kv_states=shared,
        )  # fmt: skip
        hidden = found.last_hidden_state
    return found.logits[0, 0].numpy()


def ours(name: str, text: list[int], path: tuple[int, ...]) -> list[np.ndarray]:
    """The logits [V] after a text and after each draft of a path below it."""
    model = target(name)
    drafter = specjax.load_drafter(folder(name), model)
    source, params = drafter.source, drafter.arrays(model)
    tokens = np.array([text[:-1]], np.int32)
    positions, count = np.arange(tokens.shape[1])[None], np.array([tokens.shape[1]], np.int32)
    cache = model.model.init_cache(1, 64)
    read = model.model.apply(model.params, tokens, positions, cache, taps=source.taps)
    block = Block(tokens, read.hidden, count, read.features)
    state = driven(Chain(source, len(path) + 1))[0](params, block)
    pending = jnp.array([text[-1]], jnp.int32)
    context = Greedy(
        pending, None, lambda logits, path: logits, True, False, read.staged.commit(count)
    )
    _, reading, logits = source.begin(params, state, context)
    found = [logits[0]]
    for token in path:
        reading, logits = source.extend(params, reading, jnp.array([token], jnp.int32))
        found.append(logits[0])
    return [np.asarray(row) for row in found]


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name):
    """For texts shorter and longer than the window; a head by clusters reads some of the tokens."""
    for prompt in PROMPTS:
        for depth, row in enumerate(ours(name, prompt, PATH)):
            full = wanted(name, prompt, PATH[:depth])
            read = np.isfinite(row)
            assert read.sum() == (len(row) // CLUSTERS * BEST if CASES[name][1] else len(row))
            within = 1e-4 * np.abs(full).max()
            np.testing.assert_allclose(row[read], full[read], 0, within, err_msg=f"{depth}")
            assert (full[~read] < full[read].min()).all()


@pytest.mark.parametrize("name", CASES)
def test_text_is_that_of_plain_decoding(name):
    """Greedy and sampled, as a chain and as trees; streamed, too."""
    model = target(name)
    drafters = [
        specjax.load_drafter(folder(name), model),
        specjax.load_drafter(folder(name), model, StaticTree, branching=(3, 2)),
        specjax.load_drafter(folder(name), model, DynamicTree, depth=3, width=3, num_nodes=8),
    ]
    for settings in ({}, {"temperature": 1.0, "seed": 3}):
        settings = {**settings, "max_new_tokens": NEW, "eos": []}
        plain = specjax.generate(model, PROMPTS, num_drafts=0, **settings)
        for drafter in drafters:
            found = specjax.generate(model, PROMPTS, drafter=drafter, **settings)
            assert [list(row) for row in found.tokens] == [list(row) for row in plain.tokens]


def test_drafts_are_those_of_an_oracle_without_a_loop():
    """What a chain drafts greedily, and that a row of one token drafts nothing at first."""
    name, model = "31B", target("31B")
    drafter = specjax.load_drafter(folder(name), model, Chain, num_drafts=3)
    out = specjax.generate(model, [TEXT[:1], TEXT[:12]], drafter=drafter, max_new_tokens=8, eos=[])
    plain = specjax.generate(model, [TEXT[:1], TEXT[:12]], num_drafts=0, max_new_tokens=8, eos=[])
    assert [list(row) for row in out.tokens] == [list(row) for row in plain.tokens]


REFUSED = {
    "another target": ({"backbone_hidden_size": 32}, "the hidden size is 16"),
    "another window": ({"text_config.sliding_window": 5}, "the window of layer 0 is 5"),
    "clusters that do not fit": ({"num_centroids": 7}, "num_centroids is 7"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what, tmp_path):
    """The error names the value."""
    changes, words = REFUSED[what]
    made = folder("E2B, by cluster")
    config = json.loads((made / "config.json").read_text())
    for name, value in changes.items():
        *outer, last = name.split(".")
        functools.reduce(dict.__getitem__, outer, config)[last] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(load_file(made / "model.safetensors"), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=words):
        specjax.load_drafter(tmp_path, target("E2B, by cluster"))
