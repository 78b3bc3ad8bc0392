"""A map is learned from the embedding of each anchor's token."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.methods.published import SharedParams, embedding_of
from specjax.models import TransformerConfig
from specjax.training.drafters import Guess, Learner, Lesson
from toy_method.source import MapSource


@dataclasses.dataclass(frozen=True, eq=False)
class MapLearner(Learner):
    source: MapSource

    def init(self, key: Array) -> Any:
        size = self.source.layers.hidden_size
        return {"map": jax.random.normal(key, (self.source.depth, size, size)) * size**-0.5}

    def guesses(self, params: SharedParams, lesson: Lesson) -> list[Guess]:
        tokens = jnp.take_along_axis(lesson.tokens, lesson.anchors, axis=1)
        embedded = embedding_of(params)[tokens]
        return [
            Guess(embedded @ matrix, lesson.anchors + d, lesson.weight(d), depth=d)
            for d, matrix in enumerate(params.own["map"])
        ]


def plan_map(
    options: Any, target: TransformerConfig, taps: tuple[int, ...], mask_token: int
) -> Learner:
    source = MapSource(target, target.vocab_size, options.num_drafts)
    return MapLearner(source, "cross-entropy", 1.0, own_head=False)
