"""What speculation costs on this device, measured."""

from specjax.tune.costs import step_costs, step_seconds

__all__ = ["step_costs", "step_seconds"]
