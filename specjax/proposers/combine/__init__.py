"""Proposers over other proposers."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.proposers.combine.cost_aware import CostAware, CostAwareParams
    from specjax.proposers.combine.first_of import FirstOf, with_logits

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "CostAware",
    "CostAwareParams",
    "FirstOf",
    "with_logits",
]
