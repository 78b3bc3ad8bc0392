"""Decoding a target that has latent attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from latent_model import CAPACITY, EOS, ROWS, VOCAB, close, model, read, tokens, weights

import specjax

pytestmark = pytest.mark.xdist_group("latent decoding")  # a share takes all of them, or none


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
