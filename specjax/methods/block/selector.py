"""`CandidateSelector`: scores the best tokens of a slot by the token before (DFlash-2).

    score(x) = logits[x] + sum(A[previous] * (P h) * S[x])    for the k tokens of greatest logit

h is the slot's hidden state.  All other tokens are left out.

Reference: z-lab's DFlash-2, package `dflash` 0.1.0.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from specjax import sampling
from specjax._internal.checks import within
from specjax.methods.block.correction import Correction, Shapes, Slot, multiply
from specjax.models import look_up
from specjax.types import Arrays


@dataclasses.dataclass(frozen=True)
class CandidateSelector(Correction):
    """Scores candidates.  Attributes: rank, the width of a row of A and S; top_k, k candidates."""

    rank: int
    top_k: int

    def __post_init__(self) -> None:
        within("selector_rank", self.rank, 1)
        within("selector_top_k", self.top_k, 1, self.draft_vocab_size)

    def shapes(self) -> Shapes:
        return {
            ("projection",): (self.hidden_size, self.rank),
            ("predecessor",): (self.vocab_size, self.rank),
            ("successor",): (self.draft_vocab_size, self.rank),
        }

    def correct(self, params: Arrays, slot: Slot, memory: Arrays) -> tuple[Array, Arrays]:
        best, candidates = sampling.top_k(slot.logits, self.top_k)  # [B, k]
        before = look_up(params["predecessor"], slot.previous)  # [B, M, r]
        query = before * multiply(slot.hidden, params["projection"])[:, None]
        after = look_up(params["successor"], candidates)  # [B, k, r]
        score = best[:, None] + jnp.einsum("bmr,bkr->bmk", query, after).astype(jnp.float32)
        rows = jnp.arange(len(best))[:, None, None]
        paths = jnp.arange(score.shape[1])[None, :, None]
        empty = jnp.full((*score.shape[:2], slot.logits.shape[-1]), -jnp.inf)
        return empty.at[rows, paths, candidates[:, None]].set(score), None
