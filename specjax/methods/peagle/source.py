"""`PEagleSource`: an EAGLE-3 head that predicts several tokens in one pass."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from specjax._internal.checks import within
from specjax.contract import BlockSource, Context
from specjax.methods.eagle3 import (
    Eagle3Config,
    Eagle3State,
    EagleParams,
    EagleSource,
    fuse,
    logits_of,
    read_pairs,
)
from specjax.proposers import then_pending
from specjax.types import Block


@dataclasses.dataclass(frozen=True)
class PEagleSource(
    EagleSource[Eagle3Config], BlockSource[EagleParams, Eagle3State, Eagle3State, None]
):
    """An EAGLE-3 head that reads pairs of a mask token and a learned feature in place of drafts.

        text        a   b   c   d|                d is pending
        pairs      a'b b'c c'd |m*m m*m           m is the mask token, m* its learned feature
        predicts            e    f   g

    A pass reads the pairs of newly committed tokens, then depth - 1 mask pairs, and attention is
    causal.  So a mask pair sees all committed tokens and the mask pairs before it.

    Reference: the P-EAGLE models of speculators and of SpecForge (parallel drafting with EAGLE-3).
    """

    network: Eagle3Config
    vocab_size: int  # the target's
    mask_token: int
    depth: int = 8
    taps: tuple[int, ...] = (2,)

    def __post_init__(self) -> None:
        super().__post_init__()
        within("depth", self.depth, 1)
        within("mask_token", self.mask_token, 0, self.vocab_size - 1)

    def init(self, params: EagleParams, prompt: Block, capacity: int) -> Eagle3State:
        width = self.depth + 1
        # A pass stages the pairs of all tokens that a step may commit, and the mask pairs.
        return self.empty(prompt, width, capacity + width + self.depth)

    def marginals(
        self, params: EagleParams, state: Eagle3State, context: Context
    ) -> tuple[Array, Array, Eagle3State]:
        tokens = then_pending(state.fresh, state.count, context.pending)[:, 1:]
        more = ((0, 0), (0, self.depth - 1))
        real = jnp.arange(tokens.shape[1] + self.depth - 1) < state.count[:, None]
        tokens = jnp.where(real, jnp.pad(tokens, more), self.mask_token)
        features = jnp.pad(state.features, (*more, (0, 0)))
        mask = params.own["mask_hidden"].astype(features.dtype)
        features = jnp.where(real[..., None], features, mask)
        features = fuse(self.network, params, state.cache, features)
        _, normed, cache = read_pairs(self.network, params, state.cache, tokens, features)
        # The pair with the pending token predicts the first draft.
        at = jnp.maximum(state.count - 1, 0)[:, None] + jnp.arange(self.depth)
        normed = jnp.take_along_axis(normed, at[..., None], axis=1)
        cache = cache.commit(state.count)
        state = dataclasses.replace(state, cache=cache, count=jnp.zeros_like(state.count))
        logits = logits_of(params, normed, self.vocab_size, self.network.dot_general)
        return logits, cache.length > 0, state
