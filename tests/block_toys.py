"""Block drafts for the targets of `toy_models.py`, which are right now and then."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from started import started
from toy_models import ROWS, VOCAB, ToyModels

from specjax.contract import Context
from specjax.methods import (
    BlockDraft,
    BlockDraftConfig,
    BlockDraftSource,
    MarkovHead,
    SharedParams,
    initial_block,
)
from specjax.models import TransformerConfig
from specjax.types import Block

TAPS = (1, 2)
_LAYERS = TransformerConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    mlp_size=48,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_positions=64,
    qk_norm="head",
    windows=(5, None),
    init_scale=0.35,
)
_CONFIG = BlockDraftConfig(_LAYERS, 2 * 32, block_size=4, mask_token=3, causal=(True, False))
_HEAD = MarkovHead(32, VOCAB, VOCAB, rank=VOCAB, kind="rnn", confidence_head="both")

PLAIN = BlockDraftSource(BlockDraft(_CONFIG), VOCAB, TAPS)
"""A draft as of DFlash, with a head of its own."""

CORRECTED = BlockDraftSource(BlockDraft(_CONFIG), VOCAB, TAPS, _HEAD, confidence_threshold=0.2)
"""As of DSpark, with a stop by its confidence head."""


@functools.cache
def _draft() -> Any:
    return jax.jit(lambda key: initial_block(PLAIN.net, key))(jax.random.key(8))


@functools.cache
def plain_params(toys: ToyModels) -> SharedParams:
    """The head is fitted to `greedy_texts`, so it is right now and then."""
    texts = toys.greedy_texts()
    taps = [
        np.asarray(_features(toys, some)) for some in np.split(texts, len(texts) // ROWS)
    ]  # in the batches that other tests compile
    features = np.concatenate(taps)
    rows, length, _ = features.shape
    own = {"draft": _draft()}
    params = SharedParams(
        own, {"embedding": toys.weights()["embedding"], "head": toys.weights()["head"]}
    )
    states, labels = [], []

    @jax.jit
    def read(count: Any, pending: Any) -> Any:
        block = Block(jnp.asarray(texts), jnp.zeros((rows, length, 32)), count, features)
        state = started(PLAIN, params, block, length)
        context = Context(pending, None, None, True, False, None)  # type: ignore[arg-type]
        return PLAIN.marginals(params, state, context)[2].hidden

    for at in range(4, length - PLAIN.depth):
        hidden = read(jnp.full(rows, at, jnp.int32), jnp.asarray(texts[:, at]))
        states.append(np.asarray(hidden).reshape(-1, 32))
        labels.append(texts[:, at + 1 : at + 1 + PLAIN.depth].reshape(-1))
    x, label = np.concatenate(states), np.concatenate(labels)
    fitted = 8 * np.linalg.lstsq(x, np.eye(VOCAB)[label], rcond=None)[0]
    return SharedParams(
        {**own, "head": {"kernel": jnp.asarray(fitted, jnp.float32)}},
        {"embedding": toys.weights()["embedding"]},
    )


def _features(toys: ToyModels, tokens: np.ndarray) -> Any:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return jax.jit(toys.model().apply, static_argnames="taps")(
        toys.weights(), jnp.asarray(tokens), positions, taps=TAPS
    ).features


@functools.cache
def corrected_params(toys: ToyModels) -> SharedParams:
    """The head prefers the tokens that followed the token before in `greedy_texts`."""
    follows = np.full((VOCAB, VOCAB), 0.1)
    for text in toys.greedy_texts():
        np.add.at(follows, (text[:-1], text[1:]), 1.0)
    follows = np.log(follows / follows.sum(1, keepdims=True))
    rank, rng = VOCAB, np.random.default_rng(9)
    joint = rng.normal(0, 0.02, (2 * rank + 32, 3 * rank))
    joint[rank : 2 * rank, 2 * rank :] += np.eye(rank)  # what is read is mostly the token before
    correction = {
        "before": 2 * np.eye(VOCAB),
        "after": follows,
        "joint": {"kernel": joint, "bias": np.zeros(3 * rank)},
        "confidence": {
            "kernel": rng.normal(0, 0.6, (32 + rank, 1)),
            "bias": np.full(1, 1.0),
        },
    }
    params = plain_params(toys)
    own = {
        **params.own,
        "correction": jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), correction),
    }
    return SharedParams(own, params.target)
