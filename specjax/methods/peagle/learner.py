"""Trains P-EAGLE heads: the drafts of all depths are learned in one pass.

Reference: the P-EAGLE models of speculators and of SpecForge.  They drop more anchors at later
depths; here all depths have the anchors of the step.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from specjax.contract import Weights
from specjax.methods.eagle3.learner import (
    first_guess,
    fuse,
    initial_eagle3,
    network_like,
    read,
    read_text,
)
from specjax.methods.peagle.source import PEagleSource
from specjax.methods.published import SharedParams
from specjax.models import TransformerConfig
from specjax.training.drafters.learner import Guess, Learner, Lesson
from specjax.training.drafters.sizes import Sizes, owns_head


@dataclasses.dataclass(frozen=True, eq=False)
class PEagleLearner(Learner):
    """Trains a head: after the pairs of a text, each anchor has a branch of mask pairs by depth."""

    source: PEagleSource

    def init(self, key: Array) -> Weights:
        c, (network, mask) = self.source.network, jax.random.split(key)
        wide = c.num_taps * c.target_size
        return {
            "network": initial_eagle3(self.source, network),
            "mask_hidden": c.layers.init_scale * jax.random.normal(mask, (wide,)),
        }

    def guesses(self, params: SharedParams, lesson: Lesson) -> list[Guess]:
        _, normed, cache = read_text(self.source, params, lesson)
        guesses, width = [first_guess(normed, lesson)], self.source.depth - 1
        if width == 0:
            return guesses
        rows, count = lesson.anchors.shape
        # A mask pair follows the pair at the position before its anchor.
        positions = lesson.anchors[:, :, None] + jnp.arange(width)
        feature = fuse(self.source, params, params.own["mask_hidden"][None, None])
        flat = positions.reshape(rows, -1)
        _, normed, _ = read(
            self.source,
            params,
            jnp.full(flat.shape, self.source.mask_token, jnp.int32),
            jnp.broadcast_to(feature, (*flat.shape, feature.shape[-1])),
            flat,
            cache.leaving(lesson.anchors, positions),
        )
        normed = normed.reshape(rows, count, width, -1)
        for depth in range(1, width + 1):
            hidden, at = normed[:, :, depth - 1], lesson.anchors + depth
            guesses.append(Guess(hidden, at, lesson.weight(depth), depth=depth))
        return guesses


def plan_peagle(
    options: Sizes, target: TransformerConfig, taps: tuple[int, ...], mask_token: int
) -> Learner:
    """Plans the learner of a new P-EAGLE head; see `specjax.training.drafters.plan`."""
    network = network_like(options, target, taps, 2)
    return PEagleLearner(
        source=PEagleSource(network, target.vocab_size, mask_token, options.num_drafts, taps),
        objective="forward-kl",
        decay=0.8,
        own_head=owns_head(options, True),
    )
