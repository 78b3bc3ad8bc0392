"""Taps are the hidden states of transformers."""

import folders
import jax.numpy as jnp
import numpy as np
import torch
import transformers_folders

import specjax


def test_features_are_those_of_transformers():
    """`output_hidden_states` uses the same numbers, except that its last entry is tap L + 1: it
    went through the final norm."""
    model = transformers_folders.random_llama(4)
    loaded = specjax.load(transformers_folders.write(model, "taps"))
    tokens = folders.random_tokens(60)
    with torch.no_grad():
        wanted = model(torch.from_numpy(tokens).long(), output_hidden_states=True).hidden_states
    layers = loaded.model.num_taps - 2
    assert len(wanted) == layers + 1 > 2
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    taps = (*range(layers), layers + 1)
    out = loaded.model.apply(loaded.params, jnp.asarray(tokens), places, taps=taps)
    for our, their in zip(jnp.split(out.features, layers + 1, axis=-1), wanted, strict=True):
        assert their.std() > 0.01
        np.testing.assert_allclose(our, their.numpy(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(out.hidden, wanted[-1].numpy(), rtol=0, atol=1e-4)
