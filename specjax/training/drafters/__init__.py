"""Drafters that read hidden states of their target, as `train.drafter` trains them."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.training.drafters.kinds import KINDS, check_taps, default_taps, plan
    from specjax.training.drafters.learner import Drafts, Guess, Learner, Lesson, draw_anchors
    from specjax.training.drafters.vocabulary import draft_vocabulary, mask_token

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "KINDS",
    "Drafts",
    "Guess",
    "Learner",
    "Lesson",
    "check_taps",
    "default_taps",
    "draft_vocabulary",
    "draw_anchors",
    "mask_token",
    "plan",
]
