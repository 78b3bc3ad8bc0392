"""What speculation costs on this device, measured."""

from specjax.tune.costs import step_costs, step_seconds
from specjax.tune.options import Learned, option_seconds

__all__ = ["Learned", "option_seconds", "step_costs", "step_seconds"]
