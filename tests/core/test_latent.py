"""Latent attention: its cache holds one vector a token, and every way to read a text agrees."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.models import attention
from specjax.models.mixers import Latent

ROWS, LENGTH, VOCAB, CAPACITY, EOS = 2, 24, 29, 48, 22
SIZES = {
    "low-rank queries": Latent(kv_rank=10, nope_dim=6, rope_dim=4, value_dim=7, q_rank=9),
    "whole queries": Latent(kv_rank=5, nope_dim=3, rope_dim=8, value_dim=4),
}
CONFIG = specjax.TransformerConfig(
    vocab_size=VOCAB, hidden_size=32, mlp_size=48, num_layers=2, num_heads=4, num_kv_heads=4,
    head_dim=4, max_positions=64, init_scale=0.35, interleaved=True, query_scale=0.6,
)  # fmt: skip


@functools.cache
def model(kind="low-rank queries"):
    sizes = (SIZES[kind],) * CONFIG.num_layers
    return specjax.LinenModel(specjax.Transformer(dataclasses.replace(CONFIG, mixers=sizes)))


@functools.cache
def weights(kind="low-rank queries"):
    """Random weights, norms too; arrays also where `read` is being traced."""
    with jax.ensure_compile_time_eval():
        params = model(kind).init(jax.random.key(0))
        leaves, structure = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(1), len(leaves))
        noisy = [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
        return jax.tree.unflatten(structure, noisy)


def tokens(width=LENGTH):
    return np.random.default_rng(5).integers(0, VOCAB, (ROWS, width)).astype(np.int32)


@functools.partial(jax.jit, static_argnames="kind")
def read(kind, text, cache=None, mask=None, positions=None):
    if positions is None:
        start = 0 if cache is None else cache.length[:, None]
        positions = jnp.broadcast_to(start + jnp.arange(text.shape[1]), text.shape)
    return model(kind).apply(weights(kind), text, positions, cache, mask)


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


def naive(params, sizes, x, scale):
    """One layer's mixer for a single row [N, E], by the definition and in float64."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def norm(y, weight):
        return y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-6) * weight

    def rope(y):
        angle = np.arange(len(y))[:, None] * 1e4 ** (
            -np.arange(0, sizes.rope_dim, 2) / sizes.rope_dim
        )
        turned = (y[..., 0::2] + 1j * y[..., 1::2]) * np.exp(1j * angle)
        return np.stack([turned.real, turned.imag], -1).reshape(y.shape)

    if sizes.q_rank is None:
        query = x @ p["q"]["kernel"]
    else:
        query = norm(x @ p["q_a"]["kernel"], p["q_norm"]["weight"]) @ p["q_b"]["kernel"]
    both = x @ p["kv_a"]["kernel"]
    latent = norm(both[:, : sizes.kv_rank], p["kv_norm"]["weight"])
    shared, mixed = rope(both[:, sizes.kv_rank :]), []
    for head, q in enumerate(np.split(query, CONFIG.num_heads, axis=1)):
        keys, values = latent @ p["key_up"][head].T, latent @ p["value_up"][head].T
        scores = q[:, : sizes.nope_dim] @ keys.T + rope(q[:, sizes.nope_dim :]) @ shared.T
        scores = np.where(np.tri(len(x), dtype=bool), scores * scale, -np.inf)
        chance = np.exp(scores - scores.max(-1, keepdims=True))
        mixed.append(chance / chance.sum(-1, keepdims=True) @ values)
    return np.concatenate(mixed, axis=1) @ p["o"]["kernel"]


@pytest.mark.parametrize("kind", SIZES)
def test_a_layer_is_its_definition(kind):
    """The norms' eps of 1e-6 is not that of the configuration."""
    config = dataclasses.replace(model(kind).module.config, norm_eps=0.5)
    x = np.random.default_rng(2).standard_normal((1, LENGTH, CONFIG.hidden_size), np.float32)
    layer = specjax.models.LatentAttention(config, SIZES[kind], specjax.models.Dense)
    params = weights(kind)["layer_0"]["mixer"]
    turned = config.rope.rotations(jnp.arange(LENGTH)[None], SIZES[kind].rope_dim)
    found, _ = layer.apply({"params": params}, x, turned, None, None)
    close(found[0], naive(params, SIZES[kind], np.asarray(x[0], np.float64), CONFIG.query_scale))


@pytest.mark.parametrize("kind", SIZES)
def test_however_a_text_is_read(kind):
    """At once without a cache and with one, in chunks with padding rows, and token by token."""
    text = tokens()
    wanted = read(kind, text).logits
    cache = model(kind).init_cache(ROWS, CAPACITY)
    close(read(kind, text, cache).logits, wanted)
    # Row 1 reads four tokens fewer of each chunk, and its padding is overwritten.
    found, done = [[], []], np.zeros(ROWS, int)
    while (done < LENGTH).any():
        part = np.stack([np.pad(row, (0, 9))[n : n + 9] for row, n in zip(text, done, strict=True)])
        count = np.minimum(LENGTH - done, [9, 5])
        out = read(kind, part, cache)
        for row in range(ROWS):
            found[row] += list(out.logits[row, : count[row]])
        cache, done = out.staged.commit(jnp.asarray(count)), done + count
    close(np.array(found), wanted)
    cache = model(kind).init_cache(ROWS, CAPACITY)
    for i in range(LENGTH):
        out = read(kind, text[:, i : i + 1], cache)
        close(out.logits[:, 0], wanted[:, i])
        cache = out.staged.commit(jnp.ones(ROWS, jnp.int32))


def test_blocks_of_slots_are_the_whole(monkeypatch):
    """A pass of many tokens reads the slots in blocks; its gradient is that of all slots."""
    text, kind = tokens(), "low-rank queries"
    cache = model(kind).init_cache(ROWS, CAPACITY)
    at = jnp.broadcast_to(jnp.arange(LENGTH), text.shape)

    def loss(params):
        logits = model(kind).apply(params, jnp.asarray(text), at, cache).logits
        return jax.nn.log_softmax(logits)[..., 0].sum(), logits

    def both():
        return jax.jit(jax.value_and_grad(loss, has_aux=True))(weights(kind))

    (_, wanted), slope = both()
    monkeypatch.setattr(attention, "_WIDE", LENGTH)
    monkeypatch.setattr(attention, "BLOCK_SLOTS", 9)
    (_, found), other = both()
    close(found, wanted)
    jax.tree.map(close, other, slope)


@pytest.mark.parametrize("kind", SIZES)
def test_a_gradient_is_that_of_absorbed_attention(kind):
    """Training computes keys and values; with a mask they are never made."""
    text, mask = tokens(), np.tri(LENGTH, dtype=bool)[None]
    at = jnp.broadcast_to(jnp.arange(LENGTH), text.shape)

    def loss(params, mask):
        logits = model(kind).apply(params, jnp.asarray(text), at, None, mask).logits
        return (jax.nn.log_softmax(logits)[..., 3] ** 2).sum()

    slopes = [jax.jit(jax.grad(loss))(weights(kind), seen) for seen in (None, mask)]
    jax.tree.map(close, *slopes)


def test_a_tree_is_its_chains():
    """Every node has the logits of its chain, and after the commit of a path the text goes on."""
    kind, text = "low-rank queries", tokens()
    parents = np.array([-1, 0, 0, 1, 2, 2])
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 5]]
    mask = np.zeros((1, len(parents), len(parents)), bool)
    for node, path in enumerate(paths):
        mask[0, node, path] = True
    depth = np.array([len(path) - 1 for path in paths])
    begun, nodes = text[:, :10], text[:, 10:16]
    cache = read(kind, begun, model(kind).init_cache(ROWS, CAPACITY)).staged
    cache = cache.commit(jnp.full(ROWS, 10))
    out = read(kind, nodes, cache, mask, jnp.broadcast_to(10 + depth, nodes.shape))
    for node, path in enumerate(paths):
        chain = np.concatenate([begun, nodes[:, path]], axis=1)
        close(out.logits[:, node], read(kind, chain).logits[:, -1])
    # Each row takes another path.
    taken = np.array([paths[3], paths[5]])
    cache = out.staged.commit(jnp.array([3, 2]), jnp.asarray(taken))
    last = read(kind, text[:, 20:21], cache).logits[:, 0]
    for row, count in enumerate([3, 2]):
        kept = np.concatenate([begun[row], nodes[row, taken[row, :count]], text[row, 20:21]])
        close(last[row], read(kind, kept[None]).logits[0, -1])


def test_the_cache_is_small():
    """A token takes kv_rank + rope_dim numbers a layer, whatever the number of heads."""
    sizes = SIZES["low-rank queries"]
    cache = model().init_cache(ROWS, 100)
    slots = 2 * ROWS * (100 + specjax.caches.SPARE_SLOTS)
    assert sum(x.size for x in (*cache.keys, *cache.values)) == slots * (10 + 4)
    assert {x.shape[1:] for x in cache.keys} == {(1, cache.capacity, sizes.rope_dim)}
    assert {x.shape[1:] for x in cache.values} == {(1, cache.capacity, sizes.kv_rank)}


def decoded(proposer, params=None, temperature=0.0):
    """The texts of three rows, and how many drafts were accepted."""
    rows, width = 3, 8
    dec = specjax.Decoder(model(), proposer, specjax.Match(), (EOS,), CAPACITY)
    arrays = specjax.Params(weights(), params)
    prompts = np.random.default_rng(3).integers(0, VOCAB, (rows, width)).astype(np.int32)
    state = dec.prefill(
        arrays, prompts, np.array([8, 3, 6], np.int32),
        limit=np.array([CAPACITY, 30, 40], np.int32), key=jax.random.split(jax.random.key(2), rows),
        sampling=specjax.Sampling.create(rows, temperature=temperature),
    )  # fmt: skip
    state = dec.run(arrays, state)
    ends = np.asarray(state.length)
    texts = [row[:n].tolist() for row, n in zip(np.asarray(state.tokens), ends, strict=True)]
    return texts, int(state.stats.accepted.sum())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_same_key_same_tokens(temperature):
    """Chains and trees of a draft with latent attention, and a lookup, change no token."""
    wanted, _ = decoded(specjax.NoProposer(), temperature=temperature)
    config = model().module.config.truncated(1)
    draft = specjax.LinenModel(specjax.Transformer(config))
    small = {name: leaf for name, leaf in weights().items() if name != "layer_1"}
    for proposer, params in (
        (specjax.DraftModel(draft, VOCAB, 3), small),
        (specjax.DraftTree(draft, VOCAB, (2, 2)), small),
        (specjax.NGram(3, min_ngram=1), None),
    ):
        texts, accepted = decoded(proposer, params, temperature)
        assert texts == wanted and accepted > 0


def test_bfloat16():
    """Weights and cache in bfloat16 give nearly the logits of float32."""
    half = dataclasses.replace(model(), dtype=jnp.bfloat16)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights())
    text, at = tokens(), jnp.broadcast_to(jnp.arange(LENGTH), (ROWS, LENGTH))
    out = half.apply(params, jnp.asarray(text), at, half.init_cache(ROWS, CAPACITY))
    assert {x.dtype for x in (*out.staged.keys, *out.staged.values)} == {jnp.dtype("bfloat16")}
    wanted = np.asarray(read("low-rank queries", text).logits)
    assert np.abs(np.asarray(out.logits, np.float32) - wanted).max() < 0.05 * np.ptp(wanted)


@pytest.mark.parametrize("name", ["kv_rank", "nope_dim", "rope_dim", "value_dim", "q_rank"])
def test_sizes_are_checked(name):
    with pytest.raises(ValueError, match=rf"{name}=0.*\[1, 1048576\]"):
        dataclasses.replace(SIZES["low-rank queries"], **{name: 0})


def test_a_rope_turns_pairs():
    with pytest.raises(ValueError, match="odd number of rotated dimensions"):
        mixers = (dataclasses.replace(SIZES["whole queries"], rope_dim=3),) * 2
        dataclasses.replace(CONFIG, mixers=mixers)
