"""Decoding a target that has layers with a state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid_model import CAPACITY, CONFIG, MODEL, ROWS, VOCAB, weights

import specjax
from specjax import Decoder, DraftModel, DraftTree, EarlyExit, Match, NGram, NoProposer, Params
from specjax.caches import HybridCache
from specjax.models import LinenModel, Transformer


@functools.cache
def decoded(name, temperature):
    """Texts and the last state of a proposer under `match`."""
    draft = LinenModel(Transformer(CONFIG.truncated(1)))
    own = {k: weights()[k] for k in ("embedding", "norm", "head", "layer_0")}
    proposer, params = {
        "none": (NoProposer(), ()),
        "ngram": (NGram(num_drafts=3), ()),
        "draft": (DraftModel(draft, VOCAB, 3), own),
        "tree": (DraftTree(draft, VOCAB, (2, 2, 1)), own),
    }[name]
    prompt = jnp.asarray(np.random.default_rng(0).integers(1, VOCAB, (ROWS, 20)), jnp.int32)
    decoder = Decoder(MODEL, proposer, Match(), (0,), CAPACITY)
    arrays = Params(weights(), params)
    state = decoder.prefill(
        arrays, prompt, jnp.array([20, 7, 1]), limit=jnp.full(ROWS, CAPACITY),
        key=jax.random.split(specjax.make_key(3), ROWS),
        sampling=specjax.Sampling.create(ROWS, temperature=temperature),
    )  # fmt: skip
    state = jax.device_get(decoder.run(arrays, state).replace(key=None))
    return [list(row[:n]) for row, n in zip(state.tokens, state.length, strict=True)], state


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["ngram", "draft", "tree"])
def test_the_same_tokens_for_the_same_key(name, temperature):
    """And the same state after them; with a recurrent draft model too."""
    texts, plain = decoded("none", temperature)
    found, state = decoded(name, temperature)
    assert found == texts
    assert isinstance(state.cache, HybridCache)
    if name != "ngram":
        assert state.stats.accepted.sum() > 3
    for mine, wanted in zip(state.cache.states, plain.cache.states, strict=True):
        np.testing.assert_allclose(mine.state, wanted.state, atol=1e-5)


def test_an_early_exit_is_refused():
    with pytest.raises(ValueError, match="layers with a recurrent state"):
        EarlyExit(MODEL, exit_layer=1)


def test_a_pass_without_drafts_is_narrow():
    """Where no row has a draft, `NGram` lets the target read one token a row, as with keys and
    values alone."""
    assert NGram(num_drafts=3).narrower == (1,)
    cache = MODEL.init_cache(ROWS, CAPACITY)
    assert cache.widened(4) is not None
