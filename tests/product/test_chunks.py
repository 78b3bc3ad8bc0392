"""Attention in chunks: drafts at the border of a chunk see what plain reading sees."""

import dataclasses

import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_families

import specjax
from specjax import tree

CASE, CHUNK = "llama4_text, one expert", 9
PARENT = np.array([-1, 0, 0, 1, 3, 2])
NODES = folders.random_tokens(6, 1, small_families.VOCAB)
TEXT = folders.random_tokens(40, 2, small_families.VOCAB)


def read_of(loaded):
    @jax.jit
    def read(params, tokens, positions, cache=None, mask=None):
        return loaded.model.apply(params, tokens, positions, cache, mask)

    return read


@pytest.mark.parametrize("ring", [False, True], ids=["whole text", "rings"])
@pytest.mark.parametrize("before", [8, 15, 16, 17, 18, 19, 25, 26])
def test_a_tree_at_the_border_of_a_chunk(before, ring):
    """A node has the logits of its path read plainly, and so has what follows a committed path;
    with windows of the same size in place of chunks the logits are others."""
    loaded = specjax.load(small_families.folder(CASE))
    read, parent = read_of(loaded), jnp.asarray(PARENT)
    cache = loaded.model.init_cache(1, 96)
    if ring:
        cache = cache.narrow(8, 32)
        assert any(cache.rings)
    places = jnp.arange(before)[None]
    cache = read(loaded.params, TEXT[:, :before], places, cache).cache.commit(jnp.array([before]))
    depth = tree.depth(parent)
    mask = tree.ancestor_mask(parent)[None]
    out = read(loaded.params, NODES, before + depth[None], cache, mask)

    def plainly(path):
        whole = np.concatenate([TEXT[:, :before], path], axis=1)
        end = whole.shape[1]
        padded = np.pad(whole, ((0, 0), (0, 40 - end)))  # one shape, so one program
        return padded, end, read(loaded.params, padded, jnp.arange(40)[None]).logits[0, end - 1]

    for node in range(len(PARENT)):
        kept = np.asarray(tree.path(parent, jnp.int32(node), 5))[: int(depth[node]) + 1]
        padded, end, wanted = plainly(NODES[:, kept])
        np.testing.assert_allclose(out.logits[0, node], wanted, atol=2e-5)
    kept = jnp.array([[0, 1, 3, 4]])
    cache = out.cache.commit(jnp.array([4]), kept)
    after = read(loaded.params, NODES[:, :1], jnp.array([[before + 4]]), cache).logits[0, 0]
    padded, end, wanted = plainly(np.concatenate([NODES[:, kept[0]], NODES[:, :1]], axis=1))
    np.testing.assert_allclose(after, wanted, atol=2e-5)
    sliding = dataclasses.replace(loaded.model.module.config, chunked=False)
    other = dataclasses.replace(loaded.model, module=specjax.Transformer(sliding))
    logits = other.apply(loaded.params, padded, jnp.arange(40)[None]).logits[0, end - 1]
    assert np.abs(logits - wanted).max() > 1e-3 or (end - 1) % CHUNK == CHUNK - 1


def test_chunks_without_a_cache():
    """The chunks are those of the positions, and not of the places of tokens in a pass."""
    loaded = specjax.load(small_families.folder(CASE))
    config = loaded.model.module.config.truncated(1)  # later layers see the whole text
    model = dataclasses.replace(loaded.model, module=specjax.Transformer(config))
    params = {k: v for k, v in loaded.params.items() if k not in ("layer_1", "layer_2")}
    tokens, places = TEXT[:, :20], 5 + jnp.arange(20)[None]
    cache = dataclasses.replace(model.init_cache(1, 64), length=jnp.array([5]))
    found = model.apply(params, tokens, places, cache).logits
    wanted = model.apply(params, tokens, places).logits
    # Slots 0 to 4 hold zeros, which the rest of the first chunk sees.
    rest = CHUNK - 5
    np.testing.assert_allclose(found[0, rest:], wanted[0, rest:], atol=2e-5)
    assert np.abs(found[0, :rest] - wanted[0, :rest]).max() > 1e-3


@pytest.mark.parametrize("before", [6, 8, 9, 10, 17])
def test_texts_that_cross_a_border(before):
    """Greedy texts with a chain or a tree of drafts are those of plain decoding."""
    loaded = specjax.load(small_families.folder(CASE))
    rng = np.random.default_rng(0)
    noisy = jax.tree.map(
        lambda x: jnp.asarray(x + 0.1 * x.std() * rng.normal(size=x.shape).astype(np.float32)),
        jax.device_get(loaded.params),
    )
    draft, prompt = dataclasses.replace(loaded, params=noisy), [TEXT[0, :before].tolist()]
    plain = specjax.generate(loaded, prompt, max_new_tokens=40)
    for proposer in ("draft", "tree"):
        out = specjax.generate(loaded, prompt, draft=draft, proposer=proposer, max_new_tokens=40)
        assert out.tokens == plain.tokens
        rate = out.stats.acceptance_rate
        assert rate is not None and 0.1 < rate < 1
