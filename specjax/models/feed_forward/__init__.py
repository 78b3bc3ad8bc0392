"""The feed-forward part of a layer: an MLP, or a mixture of experts."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.models.feed_forward.by_expert import Stacks, by_kernel, grouped, in_tiles
    from specjax.models.feed_forward.experts import Experts
    from specjax.models.feed_forward.mlp import MLP

__getattr__ = lazily(__name__, __file__)

__all__ = ["MLP", "Experts", "Stacks", "by_kernel", "grouped", "in_tiles"]
