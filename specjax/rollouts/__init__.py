"""Texts for evaluations and reinforcement learning, under weights that change."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.rollouts.keys import rollout_keys
    from specjax.rollouts.memory import Memory
    from specjax.rollouts.sampler import Rollouts, Sampler

__getattr__ = lazily(__name__, __file__)

__all__ = ["Memory", "Rollouts", "Sampler", "rollout_keys"]
