"""Decoders over the models of `own_models.py`, and what they should write."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import own_models
import trees
from toys import SHAPES
from toys import TABLES as toys

import specjax

CACHED = "cached function"
ROUGH = {"recurrent linen": 0.15}
"""How much noise makes a draft that is right now and then; by default 0.1."""


@functools.cache
def noisy(name):
    """The model's own weights with noise, which make a draft for it."""
    rng, scale = np.random.default_rng(1), ROUGH.get(name, 0.1)

    def noised(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        noise = scale * np.asarray(x).std() * rng.normal(size=x.shape)
        return jnp.asarray(np.asarray(x) + noise.astype(np.float32))

    return jax.tree.map(noised, own_models.own(name)[1])


def proposers(name):
    model = own_models.own(name)[0]
    return {
        "none": specjax.NoProposer(),
        "draft": specjax.DraftModel(model, toys.VOCAB, 3),
        "ngram": specjax.NGram(3, min_ngram=1),
        "tree": trees.SampledTree(model, SHAPES),
    }


def run(name, proposer, **changes):
    model, params = own_models.own(name)
    dec = specjax.Decoder(model, proposers(name)[proposer], specjax.Match(), capacity=toys.CAPACITY)
    arrays = specjax.Params(params, noisy(name))
    return dec.run(arrays, toys.prefill(dec, arrays, **changes))


@functools.cache
def decoded(name, proposer, temperature):
    state = run(name, proposer, temperature=temperature)
    return toys.texts(state), jax.device_get(state.stats)


@functools.cache
def naive(name):
    """Greedy decoding that reads the whole text again for each token."""
    model, params = own_models.own(name)
    read = jax.jit(lambda tokens: model.apply(params, tokens, places(tokens)).logits)
    return toys.naive_greedy(
        toys.PROMPTS, toys.LENGTHS, toys.LIMITS, (), lambda tokens: np.asarray(read(tokens))
    )


def places(tokens):
    return np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
