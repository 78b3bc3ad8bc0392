"""How far the predictions of a rounded model are from those of the model that it was made of."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.models import LanguageModel
from specjax.types import Weights

_ROWS = 2048
"""The tokens whose distributions are compared at once."""


class Distance(NamedTuple):
    """Two models on the tokens of a text."""

    plain: float  # the perplexity of the model
    rounded: float  # and that of the rounded one
    divergence: float  # KL(model || rounded) in nats a token
    agreement: float  # the share of tokens at which both have the same best token
    tokens: int


def distance(model: LanguageModel, rounded: LanguageModel, pieces: np.ndarray) -> Distance:
    """Compares two models of one vocabulary on pieces [P, L] of a text."""

    @jax.jit
    def compare(own: Weights, other: Weights, tokens: Array) -> Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

        def chances(each: LanguageModel, params: Weights) -> Array:
            logits = each.model.apply(params, tokens, positions).logits[:, :-1]
            return jax.nn.log_softmax(logits.astype(jnp.float32))

        p, q = chances(model, own), chances(rounded, other)
        after = tokens[:, 1:, None]
        losses = [-jnp.take_along_axis(each, after, -1).sum() for each in (p, q)]
        same = (p.argmax(-1) == q.argmax(-1)).sum()
        return jnp.stack([*losses, (jnp.exp(p) * (p - q)).sum(), same])

    rows = max(_ROWS // pieces.shape[1], 1)
    sums = np.zeros(4)
    for at in range(0, len(pieces), rows):
        tokens = jnp.asarray(pieces[at : at + rows])
        sums += np.asarray(compare(model.params, rounded.params, tokens), np.float64)
    many = len(pieces) * (pieces.shape[1] - 1)
    plain, other, divergence, same = sums / many
    return Distance(math.exp(plain), math.exp(other), float(divergence), float(same), many)
