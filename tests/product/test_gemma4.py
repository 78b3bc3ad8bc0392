"""Gemma 4 beside transformers: a text of 700 tokens in pieces, saved copies, texts with drafts."""

import dataclasses
import functools

import folders
import gemma4_families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
import transformers_folders
from test_models import theirs

import specjax
from specjax.caches import empty_cache

LENGTH, SHORT = 700, 457
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 72, "num_attention_heads": 4,
    "max_position_embeddings": 768, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    f"{family}, {case}": (family, config)
    for family, cases in gemma4_families.cases(SIZES).items()
    for case, config in cases.items()
}


@functools.cache
def made(case, gain=1.0):
    """A model of transformers whose small vectors are random, and its folder.

    `gain` scales its layers, so that its greedy text varies.
    """
    family, config = CONFIGS[case]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(family, **config), attn_implementation="eager"
    ).eval()
    scalars = [leaf for name, leaf in model.named_buffers() if name.endswith("layer_scalar")]
    assert len(scalars) == config["num_hidden_layers"]
    with torch.no_grad():
        for name, leaf in model.named_parameters():
            if leaf.ndim == 1:
                leaf.normal_(0.0 if name.endswith("bias") else 1.0, 0.3)
            elif ".layers." in name:
                leaf.mul_(gain)
            if "q_norm" in name:
                leaf.mul_(0.3)  # scores are not divided by the size of a head
        for leaf in scalars:
            leaf.normal_(1.0, 0.3)
    name = f"gemma4-{case}-{gain}".replace(" ", "-").replace(",", "")
    return model, transformers_folders.write(model, name, tokens=False)


@pytest.mark.parametrize("case", CONFIGS)
def test_a_text_in_pieces(case):
    """Two rows of several lengths, at once and with a cache: in chunks of which one row's last is
    padded, token by token, and in a last chunk; logits differ by at most 1e-4."""
    model, folder = made(case)
    loaded = specjax.load(folder)
    texts = [folders.random_tokens(n, n, vocab_size=96) for n in (LENGTH, SHORT)]
    wanted = [theirs(model, text)[0] for text in texts]
    assert wanted[0].std() > 0.3, "logits too flat to tell models apart"

    @jax.jit
    def read(params, tokens, cache, count):
        places = cache.length[:, None] + jnp.arange(tokens.shape[1])
        out = loaded.model.apply(params, tokens, places, cache)
        return out.logits, out.staged.commit(count)

    plain = jax.jit(
        lambda params, text: loaded.model.apply(params, text, jnp.arange(LENGTH)[None]).logits
    )
    np.testing.assert_allclose(plain(loaded.params, texts[0])[0], wanted[0], rtol=0, atol=1e-4)
    cache = empty_cache(loaded.model, 2, LENGTH, 8)
    owners = loaded.model.module.config.owners
    assert len(cache.keys) == len(owners) == len(cache.windows)
    assert any(ring is not None for ring in cache.rings), "no layer has a ring"
    passes = [(300, (300, 100)), (300, (300, 300)), *[(1, (1, 1))] * 9, (91, (91, 48))]
    done = np.zeros(2, int)
    for width, count in passes:
        tokens = np.stack(
            [
                np.resize(text[0, at : at + n], width)
                for text, at, n in zip(texts, done, count, strict=True)
            ]
        )
        logits, cache = read(loaded.params, tokens, cache, jnp.array(count))
        for row, (at, n) in enumerate(zip(done, count, strict=True)):
            np.testing.assert_allclose(logits[row, :n], wanted[row][at : at + n], rtol=0, atol=1e-4)
        done += count
    assert done.tolist() == [LENGTH, SHORT] == cache.length.tolist()


@pytest.mark.parametrize("case", CONFIGS)
def test_the_contract(case):
    """Chains and trees, accepted and rejected."""
    loaded = specjax.load(made(case)[1])
    specjax.models.check_model(loaded.model, loaded.params, tolerance=1e-4)


@pytest.mark.parametrize("case", CONFIGS)
def test_transformers_reads_a_saved_copy(case, tmp_path):
    """With the folder's configuration, and with one that specjax writes: equal logits."""
    model, folder = made(case)
    loaded, tokens = specjax.load(folder), folders.random_tokens(60, vocab_size=96)
    for name, files in (("as-read", loaded.files), ("written", {})):
        specjax.save(dataclasses.replace(loaded, files=files), tmp_path / name)
        again = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / name, attn_implementation="eager"
        ).eval()
        assert type(again) is type(model)
        np.testing.assert_array_equal(theirs(again, tokens), theirs(model, tokens))


def test_texts():
    """64 greedy tokens are those of transformers, plainly, with prompt lookup, with a draft model,
    with a tree of its drafts and with an early exit before or behind shared layers."""
    model, folder = made("gemma4_text, as E2B", gain=3.0)
    prompts = [folders.random_tokens(n, n, vocab_size=96)[0].tolist() for n in (9, 40)]
    texts = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=64, pad_token_id=0
        )
        texts.append(out[0, len(prompt) :].tolist())
    assert len({*texts[0], *texts[1]}) > 12, "texts too monotonous to prove anything"
    target = specjax.load(folder)
    rng = np.random.default_rng(0)
    noisy = jax.tree.map(
        lambda x: jnp.asarray(x + 0.05 * x.std() * rng.normal(size=x.shape).astype(np.float32)),
        jax.device_get(target.params),
    )
    draft = dataclasses.replace(target, params=noisy)
    for how in (
        {},
        {"proposer": specjax.NGram(min_ngram=1)},
        {"draft": draft, "num_drafts": 3},
        {"draft": draft, "proposer": specjax.DraftTree(draft.model, 96, (2, 2))},
        {"proposer": specjax.EarlyExit(target.model, exit_layer=2, num_drafts=2)},
        {"proposer": specjax.EarlyExit(target.model, exit_layer=4, num_drafts=2)},
    ):
        assert specjax.generate(target, prompts, max_new_tokens=64, **how).tokens == texts, how
