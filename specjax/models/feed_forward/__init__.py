"""The feed-forward part of a layer: an MLP, or a mixture of experts."""

from specjax.models.feed_forward.experts import Experts
from specjax.models.feed_forward.mlp import MLP

__all__ = ["MLP", "Experts"]
