"""The job of `train.medusa --teacher`: learning from hidden states that were recorded."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.contract import Arrays, Model
from specjax.methods import measure_ranks
from specjax.models import from_function, head_matrix
from specjax.training.jobs.medusa_job import Batch, TrainMedusa
from specjax.training.recorded import STATES, Recorded


@dataclasses.dataclass(frozen=True)
class _Mix:
    """The sources of the sequences, as `Recorded.batch` takes them."""

    batch_size: int
    sampled_fraction: float
    seed: int
    draft_fraction: float = 0.0
    online: bool = False
    mix: str = "sequence"


@dataclasses.dataclass(eq=False)
class RecordedMedusa(TrainMedusa):
    """Trains Medusa heads with the recorded hidden states of a target, which stays as it is."""

    teacher: Recorded = dataclasses.field(kw_only=True)
    share: float = dataclasses.field(kw_only=True)  # of the sequences with answers

    def batch(self, step: int) -> dict[str, np.ndarray]:
        o = self.options
        made = self.teacher.batch(_Mix(o.batch_size, self.share, o.seed), step)
        return {**made, "share": np.ones(o.batch_size, np.float32)}

    def hidden(self, target: Arrays, batch: Batch) -> Array:
        states = batch[STATES].astype(jnp.float32)
        return states.reshape(-1, states.shape[-1])

    def held_out(self, index: int, heads: Arrays, target: Arrays) -> tuple[np.ndarray, np.ndarray]:
        rows = self.options.batch_size
        made = self.teacher.held_out(index * rows, rows)
        return made["drawn"], self._recorded_ranks(heads, target, made)

    def drafted(self, heads: Arrays, target: Arrays) -> tuple[np.ndarray, str]:
        """Returns ranks of recorded answers that the target may have generated, else of text."""
        text, answers, _ = self.teacher.request.counts
        if not answers:
            return self.held_out_ranks(heads, target), "held-out text"
        most = min(answers, self.options.written_sequences)
        made = self.teacher.rows(list(range(text, text + most)))
        ranks = self._recorded_ranks(heads, target, made)
        return ranks[self.learned_windows(made["drawn"])], "recorded answers"

    def _recorded_ranks(
        self, heads: Arrays, target: Arrays, made: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Returns the ranks [B, T - 1 - K, K] of a batch."""
        tokens = made["tokens"][:, :-1]
        states = jnp.asarray(made[STATES], jnp.float32)
        matrix = head_matrix(target)
        ranks = measure_ranks(self._said, states, self.heads, heads, matrix, tokens)
        return ranks.reshape(len(tokens), -1, self.heads.num_heads)

    @functools.cached_property
    def _said(self) -> Model:
        """Returns a model that returns the hidden states it is given; its logits are not used."""
        size = self.target.model.vocab_size

        def said(states: Array, tokens: Array) -> tuple[Array, Array]:
            return jnp.zeros((*tokens.shape, size)), states

        return from_function(said, vocab_size=size, max_positions=self.options.sequence_length)
