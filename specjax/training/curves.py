"""Plots each metric of `metrics.jsonl` against the step.  Needs matplotlib."""

from __future__ import annotations

import pathlib
from types import ModuleType

from specjax._internal.extras import imported
from specjax.training.record import read_metrics

_COLUMNS = 3


def pyplot() -> ModuleType:
    """Returns `matplotlib.pyplot`, set up to work without a display.

    Raises:
      ValueError: matplotlib is not installed.
    """
    message = "plots need the package matplotlib: pip install matplotlib"
    imported("matplotlib", message).use("Agg")
    return imported("matplotlib.pyplot", message)


def plot_curves(folder: pathlib.Path) -> pathlib.Path:
    """Plots `metrics.jsonl` of a run's folder into `curves.png`.

    Each metric has a panel of its own, and its interval is drawn as a band.
    """
    plt = pyplot()
    lines = read_metrics(folder / "metrics.jsonl")
    metrics = {name for line in lines for name in line} - {"step"}
    bands = {name for name in metrics if {f"{name}_low", f"{name}_high"} <= metrics}
    names = sorted(metrics - {name + end for name in bands for end in ("_low", "_high")})
    rows = -(-len(names) // _COLUMNS)
    figure, panels = plt.subplots(rows, _COLUMNS, figsize=(4 * _COLUMNS, 2.6 * rows), squeeze=False)
    for panel in panels.flat[len(names) :]:
        panel.axis("off")
    for name, panel in zip(names, panels.flat, strict=False):
        points = [line for line in lines if name in line]
        steps = [line["step"] for line in points]
        panel.plot(
            steps,
            [line[name] for line in points],
            marker="." if len(points) < 30 else None,
            linewidth=1,
        )
        if name in bands:
            low, high = ([line[name + end] for line in points] for end in ("_low", "_high"))
            panel.fill_between(steps, low, high, alpha=0.2)
        panel.locator_params(axis="x", integer=True, nbins=6)
        panel.set_title(name.replace("_", " "), fontsize=10)
        panel.set_xlabel("step", fontsize=8)
        panel.tick_params(labelsize=8)
        panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(folder / "curves.png", dpi=120)
    plt.close(figure)
    return folder / "curves.png"
