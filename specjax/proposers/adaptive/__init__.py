"""Adaptive drafting: in every step as many drafts as pay, by recent acceptance and by costs."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.proposers.adaptive.policy import POLICY, Policy
    from specjax.proposers.adaptive.proposer import PAUSE, Adaptive
    from specjax.proposers.adaptive.rates import Rates
    from specjax.proposers.adaptive.state import MEASURED, RESTS, AdaptiveParams, AdaptiveState

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "MEASURED",
    "PAUSE",
    "POLICY",
    "RESTS",
    "Adaptive",
    "AdaptiveParams",
    "AdaptiveState",
    "Policy",
    "Rates",
]
