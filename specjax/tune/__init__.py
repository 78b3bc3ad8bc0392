"""What speculation costs on this device, measured."""

from specjax.tune.costs import step_costs, step_seconds
from specjax.tune.options import Learned, option_seconds
from specjax.tune.plan import Candidate, Plan, about, read_plan

__all__ = [
    "Candidate",
    "Learned",
    "Plan",
    "about",
    "option_seconds",
    "read_plan",
    "step_costs",
    "step_seconds",
]
