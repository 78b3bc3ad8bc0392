"""Drafters that read hidden states of their target, as `train.drafter` trains them."""

from specjax.training.drafters.anchors import draw_anchors
from specjax.training.drafters.kinds import KINDS, plan
from specjax.training.drafters.learner import Drafts, Guess, Learner, Lesson
from specjax.training.drafters.vocabulary import draft_vocabulary, mask_token

__all__ = [
    "KINDS",
    "Drafts",
    "Guess",
    "Learner",
    "Lesson",
    "draft_vocabulary",
    "draw_anchors",
    "mask_token",
    "plan",
]
