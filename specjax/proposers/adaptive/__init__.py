"""Adaptive drafting: in every step as many drafts as pay, by recent acceptance and by costs."""

from specjax.proposers.adaptive.policy import POLICY, Policy
from specjax.proposers.adaptive.proposer import PAUSE, Adaptive
from specjax.proposers.adaptive.rates import Rates
from specjax.proposers.adaptive.state import MEASURED, AdaptiveParams, AdaptiveState

__all__ = [
    "MEASURED",
    "PAUSE",
    "POLICY",
    "Adaptive",
    "AdaptiveParams",
    "AdaptiveState",
    "Policy",
    "Rates",
]
