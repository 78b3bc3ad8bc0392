"""Trains EAGLE-3 heads as they draft: each depth reads the states of the depth before.

Reference: Li et al. 2025 (EAGLE-3), arXiv 2503.01840, section 3.2, "training-time test".
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from specjax.caches import BranchCache
from specjax.contract import Weights
from specjax.methods.eagle3.network import Eagle3, Eagle3Config
from specjax.methods.eagle3.source import Eagle3Source, EagleSource
from specjax.methods.published import SharedParams, embedding_of
from specjax.models import TransformerConfig, look_up
from specjax.training.drafters.learner import Guess, Learner, Lesson
from specjax.training.drafters.sizes import Sizes, layers_like, owns_head
from specjax.training.precision import mixed_dot_general


@dataclasses.dataclass(frozen=True, eq=False)
class Eagle3Learner(Learner):
    """Trains a head: every position of a text trains the first depth, the anchors later ones.

    A state that is fed back has a gradient, so early depths learn to help later ones.
    """

    source: Eagle3Source
    depth: int = 7

    def init(self, key: Array) -> Weights:
        return {"network": initial_eagle3(self.source, key)}

    def guesses(self, params: SharedParams, lesson: Lesson) -> list[Guess]:
        return guesses_of(self.source, params, lesson, self.depth)


def guesses_of(
    source: EagleSource, params: SharedParams, lesson: Lesson, depth: int
) -> list[Guess]:
    """Returns the predictions of all depths of a source that drafts one token after another."""
    fed, normed, cache = read_text(source, params, lesson)
    guesses = [first_guess(normed, lesson)]
    # The pair of an anchor's token is at the position of the feature before it.
    root = lesson.anchors - 1
    features, cache = _at(fed, root), cache.leaving(root + 1, (root + 1)[:, :, None])
    for below in range(1, depth):
        tokens = _tokens(lesson, below)
        positions = (root + below)[:, :, None]
        cache = cache if below == 1 else cache.go_on(positions)
        features, normed, cache = read(source, params, tokens, features, positions[:, :, 0], cache)
        at = lesson.anchors + below
        guesses.append(Guess(normed, at, lesson.weight(below), depth=below))
    return guesses


def initial_eagle3(source: EagleSource[Eagle3Config], key: Array) -> Weights:
    """Makes random parameters of the network of a head."""
    c = source.network
    inputs = (
        jnp.zeros((1, 1, c.num_taps * c.target_size)),
        jnp.zeros((1, 1, c.layers.hidden_size)),
        jnp.zeros((1, 1), jnp.int32),
    )
    made = jax.jit(Eagle3(c).init, static_argnames="method")(key, *inputs, method="everything")
    return nn.meta.unbox(made)["params"]


def read(
    source: EagleSource,
    params: SharedParams,
    tokens: Array,
    features: Array,
    positions: Array,
    cache: BranchCache,
) -> tuple[Array, Array, BranchCache]:
    """Runs one pass over pairs of tokens [B, N] and features [B, N, E]; as `Eagle3.__call__`."""
    embedded = look_up(embedding_of(params), tokens)
    out = _network(source, params, embedded, features, positions, cache)
    return cast(tuple[Array, Array, BranchCache], out)


def fuse(source: EagleSource, params: SharedParams, features: Array) -> Array:
    """Fuses the target's hidden states [B, N, F] into features [B, N, E]."""
    return cast(Array, _network(source, params, features, method="fuse"))


def read_text(
    source: EagleSource, params: SharedParams, lesson: Lesson
) -> tuple[Array, Array, BranchCache]:
    """Reads all pairs of a text: those of the feature at t and the token at t + 1."""
    rows, length = lesson.features.shape[:2]
    cache = BranchCache.text(rows, length)
    features = fuse(source, params, lesson.features)
    return read(source, params, lesson.tokens[:, 1:], features, cache.positions, cache)


def first_guess(normed: Array, lesson: Lesson) -> Guess:
    """Returns the guesses of the first depth, at every position of a text.

    The pair at position t predicts the token at t + 2.
    """
    at = jnp.broadcast_to(jnp.arange(1, normed.shape[1]), (len(normed), normed.shape[1] - 1))
    return Guess(normed[:, :-1], at, lesson.learned[:, 1:])


def _network(source: EagleSource, params: SharedParams, *inputs: object, **how: Any) -> object:
    own = {"params": params.own["network"]}
    return source.network.network(mixed_dot_general).apply(own, *inputs, **how)


def _tokens(lesson: Lesson, depth: int) -> Array:
    """Returns [B, A] the tokens `depth` after the anchors; any token after the end of the text."""
    last = lesson.tokens.shape[1] - 1
    return jnp.take_along_axis(lesson.tokens, jnp.minimum(lesson.anchors + depth, last), axis=1)


def _at(x: Array, index: Array) -> Array:
    """Gathers x [B, N, E] at the indices [B, A]: [B, A, E]."""
    return jnp.take_along_axis(x, index[..., None], axis=1)


def plan_eagle3(
    options: Sizes, target: TransformerConfig, taps: tuple[int, ...], mask_token: int
) -> Learner:
    """Plans the learner of a new EAGLE-3 head; see `specjax.training.drafters.plan`."""
    return Eagle3Learner(
        source=Eagle3Source(network_like(options, target, taps, 1), target.vocab_size, taps),
        objective="forward-kl",
        decay=0.8,
        own_head=owns_head(options, True),
        depth=options.num_drafts,
    )


def network_like(
    options: Sizes, target: TransformerConfig, taps: tuple[int, ...], num_layers: int
) -> Eagle3Config:
    """Returns the network of a new head: layers of the target's sizes, `num_layers` by default."""
    layers = layers_like(target, options.num_layers or num_layers, options.mlp_size, "llama")
    return Eagle3Config(layers, len(taps), target.hidden_size)
