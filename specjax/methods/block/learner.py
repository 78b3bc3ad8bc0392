"""Block drafts: DFlash, and DSpark with its correction and its estimate of the acceptance.

References: Chen, Liang and Liu 2026 (DFlash), arXiv 2602.06036, section 4; DeepSeek's DeepSpec.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax import Array

from specjax.caches import BranchCache
from specjax.contract import Weights
from specjax.methods.block.correction import Slot
from specjax.methods.block.markov import MarkovHead
from specjax.methods.block.network import (
    BlockDraft,
    BlockDraftConfig,
    initial_block,
    read_block,
    stage_context,
)
from specjax.methods.block.source import BlockDraftSource
from specjax.methods.published import SharedParams, embedding_of, head_of
from specjax.models import TransformerConfig, look_up
from specjax.training.drafters.learner import Guess, Learner, Lesson
from specjax.training.drafters.sizes import Sizes, layers_like, owns_head, units_of
from specjax.training.precision import mixed_dot_general


@dataclasses.dataclass(frozen=True, eq=False)
class BlockLearner(Learner):
    """Trains a block draft: each anchor has a block of masks, which sees the text up to it."""

    source: BlockDraftSource

    def init(self, key: Array) -> Weights:
        network, rest = jax.random.split(key)
        made = {"draft": initial_block(self.source.net, network)}
        correction = self.source.correction
        if correction is not None:
            shapes = correction.shapes()
            keys = jax.random.split(rest, len(shapes))
            made["correction"] = unflatten_dict(
                {
                    path: _first(path, shape, key)
                    for (path, shape), key in zip(sorted(shapes.items()), keys, strict=True)
                }
            )
        return made

    def guesses(self, params: SharedParams, lesson: Lesson) -> list[Guess]:
        config = self.source.net.config
        net = BlockDraft(config, mixed_dot_general)
        rows, count = lesson.anchors.shape
        length, size = lesson.features.shape[1], config.block_size
        cache = BranchCache.text(rows, length)
        cache = stage_context(net, params.own["draft"], lesson.features, cache)
        positions = lesson.anchors[:, :, None] + jnp.arange(size)
        pending = jnp.take_along_axis(lesson.tokens, lesson.anchors, axis=1)
        block = jnp.full((rows, count, size), config.mask_token, jnp.int32)
        block = block.at[:, :, 0].set(pending).reshape(rows, -1)
        embedded = look_up(embedding_of(params), block) * config.embedding_scale
        hidden, _ = read_block(
            net, params.own["draft"], embedded, cache.leaving(lesson.anchors, positions)
        )
        hidden = hidden.reshape(rows, count, size, -1)[:, :, config.first_slot :]
        hidden = hidden * config.output_scale
        if self.source.correction is None:
            return [
                Guess(hidden[:, :, d], lesson.anchors + d, lesson.weight(d), depth=d)
                for d in range(config.num_drafts)
            ]
        return self._corrected(params, lesson, hidden)

    def _corrected(self, params: SharedParams, lesson: Lesson, hidden: Array) -> list[Guess]:
        """Returns the guesses conditioned on the text's own tokens.

        A Markov head adds a linear map of `inner` to the logits, so one matrix makes them from
        `inner` and the hidden state.
        """
        correction, own = self.source.correction, params.own["correction"]
        assert isinstance(correction, MarkovHead)
        guesses, memory = [], None
        rows, count, depth, size = hidden.shape
        last = lesson.tokens.shape[1] - 1
        for d in range(depth):
            before = jnp.minimum(lesson.anchors + d, last)
            previous = jnp.take_along_axis(lesson.tokens, before, axis=1).reshape(-1, 1)
            flat = hidden[:, :, d].reshape(-1, size)
            embed = functools.partial(look_up, embedding_of(params), previous)
            slot = Slot(d, flat, flat[:, :0], previous, embed)
            wide = flat
            if correction.rank:
                inner, memory = correction.inner(own, slot, memory)
                wide = jnp.concatenate([flat, inner[:, 0]], axis=-1)
            confidence = None
            if correction.estimates:
                confidence = correction.confidence(own, slot).reshape(rows, count)
            guesses.append(
                Guess(
                    wide.reshape(rows, count, -1),
                    lesson.anchors + d,
                    lesson.weight(d),
                    confidence,
                    depth=d,
                )
            )
        return guesses

    def head(self, params: SharedParams) -> Array:
        matrix, correction = head_of(params), self.source.correction
        if not isinstance(correction, MarkovHead) or correction.rank == 0:
            return matrix
        if not self.own_head:
            matrix = jax.lax.stop_gradient(matrix)
        return jnp.concatenate([matrix, params.own["correction"]["after"]])

    @property
    def trains_head(self) -> bool:
        correction = self.source.correction
        return self.own_head or (isinstance(correction, MarkovHead) and correction.rank > 0)

    @property
    def estimates(self) -> bool:
        return self.source.correction is not None and self.source.correction.estimates


def _first(path: tuple[str, ...], shape: tuple[int, ...], key: Array) -> Array:
    """Returns an initial parameter of a correction, which at first corrects nothing."""
    if path[-1] == "bias" or path == ("after",):
        return jnp.zeros(shape)
    return 0.02 * jax.random.normal(key, shape)


def _plan(
    options: Sizes,
    target: TransformerConfig,
    taps: tuple[int, ...],
    mask_token: int,
    corrects: bool,
) -> BlockLearner:
    drafts, units = options.num_drafts, units_of(options, target)
    first = 0 if corrects else 1
    layers = layers_like(target, options.num_layers or 2, options.mlp_size, "qwen3")
    config = BlockDraftConfig(
        layers=layers,
        feature_size=len(taps) * target.hidden_size,
        block_size=drafts + first,
        mask_token=mask_token,
        first_slot=first,
        embedding_scale=target.embedding_scale,
        logit_softcap=target.logit_softcap,
    )
    size, correction = layers.hidden_size, None
    if corrects:
        correction = MarkovHead(
            size,
            target.vocab_size,
            units,
            options.markov_rank,
            options.markov_head,
            ("both" if options.markov_rank else "hidden") if options.confidence else None,
        )
    # gamma of the authors: 4 for blocks of up to 8 tokens, else 7; DSpark has 4.
    gamma = 4 if corrects or drafts < 8 else 7
    return BlockLearner(
        source=BlockDraftSource(BlockDraft(config), target.vocab_size, taps, correction),
        objective="cross-entropy-l1" if corrects else "cross-entropy",
        decay=math.exp(-1 / gamma),
        own_head=owns_head(options, False),
        softcap=target.logit_softcap,
    )


plan_dflash = functools.partial(_plan, corrects=False)
"""Plans the learner of a new DFlash drafter; see `specjax.training.drafters.plan`."""

plan_dspark = functools.partial(_plan, corrects=True)
"""Plans the learner of a new DSpark drafter; see `specjax.training.drafters.plan`."""
