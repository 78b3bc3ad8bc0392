"""Reference for logits processors: one node, one text, plain NumPy; checked against
transformers."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np

OFF = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "bad_words": [],
    "min_new_tokens": 0,
}


def reference(logits, text, prompt_length, eos, settings, function=None):
    """[V] logits after `text`, whose first `prompt_length` tokens are the prompt."""
    s, x = OFF | settings, np.array(logits, np.float32)
    output = text[prompt_length:]
    for token, value in s["logit_bias"].items():
        x[token] += np.float32(value)
    for token in set(text):
        x[token] = (
            x[token] * np.float32(s["repetition_penalty"])
            if x[token] < 0
            else x[token] / np.float32(s["repetition_penalty"])
        )
    for token in set(output):
        x[token] -= np.float32(s["frequency_penalty"]) * output.count(token) + np.float32(
            s["presence_penalty"]
        )
    for *before, last in s["bad_words"]:
        if before == text[len(text) - len(before) :]:
            x[last] = -np.inf
    if len(output) < s["min_new_tokens"]:
        x[list(eos)] = -np.inf
    return x if function is None else function(x, text, output)


def no_repeated_pair(logits, text, counts):
    """A user's function: it bans the token that last followed the previous token, and penalises
    seen tokens."""
    follows = (text[:-1] == text[-1]) & (text[-1] >= 0)
    banned = (
        jnp.zeros(logits.shape, bool)
        .at[jnp.where(follows, text[1:], len(logits))]
        .set(True, mode="drop")
    )
    return jnp.where(banned, -jnp.inf, logits - 0.75 * (counts > 0))


def no_repeated_pair_reference(x, text, output):
    x = x - np.float32(0.75) * np.isin(np.arange(len(x)), output)
    x[[after for before, after in itertools.pairwise(text) if before == text[-1]]] = -np.inf
    return x
