"""The kinds of drafters that `train.drafter` trains: a table of functions that plan one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from specjax.models import BlockDraft, BlockDraftConfig, Eagle3Config, MarkovHead, TransformerConfig
from specjax.proposers import BlockDraftSource, Eagle3Source, PEagleSource
from specjax.training.drafters.block import BlockLearner
from specjax.training.drafters.eagle3 import Eagle3Learner
from specjax.training.drafters.layers import layers_like, taps_of
from specjax.training.drafters.learner import Learner
from specjax.training.drafters.peagle import PEagleLearner

_TAPS = {"eagle3": 3, "peagle": 3, "dflash": 5, "dspark": 5}
"""Layers of the target that a kind reads by default."""


class Sizes(Protocol):
    """The options of a drafter's network."""

    @property
    def num_drafts(self) -> int: ...

    @property
    def num_layers(self) -> int | None: ...

    @property
    def mlp_size(self) -> int | None: ...

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def own_head(self) -> bool | None: ...

    @property
    def draft_vocab_size(self) -> int: ...

    @property
    def markov_rank(self) -> int: ...

    @property
    def markov_head(self) -> str: ...

    @property
    def confidence(self) -> bool: ...


def plan(kind: str, options: Sizes, target: TransformerConfig, mask_token: int) -> Learner:
    """The learner of a kind for a target.

    Args:
      kind: a key of `KINDS`.
      options: sizes; what is None or empty is chosen by the kind and the target.
      target: the target's configuration.
      mask_token: the id that stands for a token that is not there yet.

    Raises:
      ValueError: a layer that the target does not have, or sizes that do not fit together.
    """
    for tap in options.taps:
        if not 0 <= tap <= target.num_layers:
            raise ValueError(
                f"--taps names {tap}, and the target has {target.num_layers} layers: 0 is the "
                f"embedding, and {target.num_layers} the output of the last layer"
            )
    return KINDS[kind](options, target, mask_token)


def default_taps(kind: str, num_layers: int) -> tuple[int, ...]:
    """The layers that a kind reads by default of a target with so many."""
    return taps_of(num_layers, _TAPS[kind])


def _units(options: Sizes, target: TransformerConfig) -> int:
    """U, the tokens that the drafter knows."""
    return options.draft_vocab_size or target.vocab_size


def _owns_head(options: Sizes, default: bool) -> bool:
    """A reduced vocabulary needs a head of its own."""
    if options.draft_vocab_size:
        return True
    return default if options.own_head is None else options.own_head


def _eagle3_config(
    options: Sizes, target: TransformerConfig, num_layers: int
) -> tuple[Eagle3Config, tuple[int, ...]]:
    layers = layers_like(target, options.num_layers or num_layers, options.mlp_size, "llama")
    taps = options.taps or taps_of(target.num_layers, _TAPS["eagle3"])
    return Eagle3Config(layers, len(taps), target.hidden_size), taps


def _eagle3(options: Sizes, target: TransformerConfig, mask_token: int) -> Learner:
    network, taps = _eagle3_config(options, target, 1)
    return Eagle3Learner(
        source=Eagle3Source(network, target.vocab_size, taps),
        objective="forward-kl",
        decay=0.8,
        own_head=_owns_head(options, True),
        depth=options.num_drafts,
    )


def _peagle(options: Sizes, target: TransformerConfig, mask_token: int) -> Learner:
    network, taps = _eagle3_config(options, target, 2)
    return PEagleLearner(
        source=PEagleSource(network, target.vocab_size, mask_token, options.num_drafts, taps),
        objective="forward-kl",
        decay=0.8,
        own_head=_owns_head(options, True),
    )


def _block(
    options: Sizes, target: TransformerConfig, mask_token: int, corrects: bool
) -> BlockLearner:
    drafts, units = options.num_drafts, _units(options, target)
    first = 0 if corrects else 1
    taps = options.taps or taps_of(target.num_layers, _TAPS["dflash"])
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
        own_head=_owns_head(options, False),
        softcap=target.logit_softcap,
    )


def _dflash(options: Sizes, target: TransformerConfig, mask_token: int) -> Learner:
    return _block(options, target, mask_token, corrects=False)


def _dspark(options: Sizes, target: TransformerConfig, mask_token: int) -> Learner:
    return _block(options, target, mask_token, corrects=True)


KINDS: dict[str, Callable[[Sizes, TransformerConfig, int], Learner]] = {
    "eagle3": _eagle3,
    "peagle": _peagle,
    "dflash": _dflash,
    "dspark": _dspark,
}
"""Kind -> function that plans its learner."""
