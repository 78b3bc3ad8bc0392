"""What speculation costs on this device, measured."""

from specjax.tune.costs import step_costs, step_seconds
from specjax.tune.options import Learned, OptionClock, option_seconds, seconds_of
from specjax.tune.plan import (
    Candidate,
    Plan,
    Tree,
    about,
    fastest_tree,
    read_plan,
    saved_plan,
)

__all__ = [
    "Candidate",
    "Learned",
    "OptionClock",
    "Plan",
    "Tree",
    "about",
    "fastest_tree",
    "option_seconds",
    "read_plan",
    "saved_plan",
    "seconds_of",
    "step_costs",
    "step_seconds",
]
