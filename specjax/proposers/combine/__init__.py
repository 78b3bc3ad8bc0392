"""Proposers over other proposers."""

from specjax.proposers.combine.cost_aware import CostAware, CostAwareParams
from specjax.proposers.combine.first_of import FirstOf, with_logits

__all__ = [
    "CostAware",
    "CostAwareParams",
    "FirstOf",
    "with_logits",
]
