"""Proposers over other proposers."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.proposers.combine.calibrated import Calibrated, CalibratedState
    from specjax.proposers.combine.cost_aware import CostAware, CostAwareParams
    from specjax.proposers.combine.first_of import FirstOf, with_logits
    from specjax.proposers.combine.judging import right_nodes
    from specjax.proposers.combine.keeping import best_nodes, ranked
    from specjax.proposers.combine.survival import Survival

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "Calibrated",
    "CalibratedState",
    "CostAware",
    "CostAwareParams",
    "FirstOf",
    "Survival",
    "best_nodes",
    "ranked",
    "right_nodes",
    "with_logits",
]
