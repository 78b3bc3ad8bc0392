"""Measures the cost of speculation on this device, and plans which options to use."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.tuning.calibrate import (
        Costs,
        Learned,
        OptionClock,
        costs_of,
        judged_by_part,
        option_costs,
        seconds_by_context,
    )
    from specjax.tuning.costs import step_costs, step_seconds
    from specjax.tuning.demand import Demand
    from specjax.tuning.kept_costs import (
        add_demand,
        keep_costs,
        keep_demand,
        read_costs,
        read_demand,
    )
    from specjax.tuning.plan import (
        Candidate,
        Plan,
        Tree,
        Weights,
        about,
        contexts_of,
        fastest_tree,
        read_plan,
        saved_plan,
        weights_of,
    )

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "Candidate",
    "Costs",
    "Demand",
    "Learned",
    "OptionClock",
    "Plan",
    "Tree",
    "Weights",
    "about",
    "add_demand",
    "contexts_of",
    "costs_of",
    "fastest_tree",
    "judged_by_part",
    "keep_costs",
    "keep_demand",
    "option_costs",
    "read_costs",
    "read_demand",
    "read_plan",
    "saved_plan",
    "seconds_by_context",
    "step_costs",
    "step_seconds",
    "weights_of",
]
