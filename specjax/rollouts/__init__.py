"""Texts for evaluations and reinforcement learning, under weights that change."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.rollouts.checkpoints import Checkpoint, find_checkpoints
    from specjax.rollouts.evaluation import Compared, Decoded, Evaluation, compare_scores
    from specjax.rollouts.keys import rollout_keys
    from specjax.rollouts.memory import Memory
    from specjax.rollouts.sampler import Rollouts, Sampler
    from specjax.rollouts.scoring import Score

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "Checkpoint",
    "Compared",
    "Decoded",
    "Evaluation",
    "Memory",
    "Rollouts",
    "Sampler",
    "Score",
    "compare_scores",
    "find_checkpoints",
    "rollout_keys",
]
