"""Measurements: candidates alternate, disturbed samples are dropped, figures have intervals."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.measure.acceptance import PromptCounts, alpha_and_tau
    from specjax.measure.intervals import Interval, interval, mean_interval, show
    from specjax.measure.machine import describe
    from specjax.measure.meter import Meter
    from specjax.measure.speculation import Counts, Measured, measure, pad, width_for
    from specjax.measure.turns import (
        Sample,
        Timed,
        first_calls,
        median_seconds,
        medians,
        take_turns,
    )

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "Counts",
    "Interval",
    "Measured",
    "Meter",
    "PromptCounts",
    "Sample",
    "Timed",
    "alpha_and_tau",
    "describe",
    "first_calls",
    "interval",
    "mean_interval",
    "measure",
    "median_seconds",
    "medians",
    "pad",
    "show",
    "take_turns",
    "width_for",
]
