"""Plots trees with their acceptance, and reports of commands; needs the extra `plot`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.typing import ArrayLike

from specjax._internal.checks import settle
from specjax._internal.extras import install
from specjax.types import ABSENT

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def tree(
    parent: ArrayLike | Sequence[int],
    acceptance: ArrayLike | Sequence[float] | None = None,
    labels: Sequence[str] | None = None,
    path: ArrayLike | Sequence[int] | None = None,
) -> Figure:
    """Draws a tree from left to right; the width and the number of an edge show its acceptance.

    Args:
      parent: [N] as in `Proposal`; absent nodes are not drawn.
      acceptance: [N] the share of times that a node was accepted where its parent was accepted,
        in [0, 1]; NaN if unknown.
      labels: [N] texts, such as tokens; by default the indices of the nodes.
      path: nodes to mark, such as the accepted ones.

    Returns:
      A matplotlib `Figure`; `savefig` writes it.

    Raises:
      ValueError: the lengths differ, a parent comes after its child, or an acceptance is outside
        [0, 1].
      ImportError: matplotlib is not installed.
    """
    parent = np.asarray(parent)
    count = len(parent)
    values = np.full(count, np.nan) if acceptance is None else np.asarray(acceptance, float)
    texts = [str(n) for n in range(count)] if labels is None else list(labels)
    if parent.ndim != 1 or not (len(values) == len(texts) == count):
        raise ValueError(
            f"parent has shape {list(parent.shape)}, "
            f"acceptance {len(values)} and labels {len(texts)} entries: pass one of each per node"
        )
    settle(
        (
            (parent >= np.arange(count)).any() or (parent < ABSENT).any(),
            f"parent={parent.tolist()}; every node must come after its parent, and {ABSENT} means "
            "no parent",
        ),
        (
            ((values < 0) | (values > 1)).any(),
            f"acceptance={values.tolist()}; probabilities lie in [0, 1]",
        ),
    )
    depth, height = _layout(parent)
    rows = max(height.values()) + 1
    figure = new_figure(2 + 1.6 * (max(depth.values()) + 1), 1 + 0.4 * rows)
    axes = figure.add_subplot()
    axes.set_axis_off()
    marked = set() if path is None else set(np.asarray(path).tolist())
    for node in depth:
        if node:
            up, chance = int(parent[node]), values[node]
            across, along = [depth[up], depth[node]], [height[up], height[node]]
            known = np.isfinite(chance)
            axes.plot(
                across, along, color="C1" if node in marked else "C0", zorder=1,
                linewidth=0.5 + 4.5 * chance if known else 1, linestyle="-" if known else ":",
            )  # fmt: skip
            if known:
                middle = float(np.mean(across)), float(np.mean(along))
                blank = {"facecolor": "white", "edgecolor": "none", "pad": 1}
                axes.text(
                    *middle, f"{chance:.2f}", fontsize=7, ha="center", va="center", bbox=blank
                )
        box = {
            "boxstyle": "round",
            "facecolor": "white",
            "edgecolor": "C1" if node in marked else "C0",
        }
        axes.text(
            depth[node],
            height[node],
            texts[node],
            fontsize=8,
            ha="center",
            va="center",
            bbox=box,
            zorder=2,
        )
    axes.invert_yaxis()
    axes.margins(0.1)
    return figure


_FIGURES = {"alpha": "alpha", "tau": "tau", "speedup": "speed-up"}


def bench(report: Mapping[str, Any]) -> Figure:
    """Draws a report of `specjax bench --json` as bars.

    There is a group of bars for each proposer, and a colour for each rule.  The bars of inexact
    rules are hatched.  There is a row of panels for each of alpha, tau and speed-up that was
    measured, and a column for each temperature.

    Returns:
      A matplotlib `Figure`.

    Raises:
      ImportError: matplotlib is not installed.
    """
    rows = [row for row in report["rows"] if row["drafted"]]
    names = [name for name in _FIGURES if any(row[name] is not None for row in rows)]
    temperatures, rules, groups = (
        list(dict.fromkeys(key(row) for row in rows))
        for key in (lambda r: r["temperature"], lambda r: r["rule"], _group)
    )
    thick = 0.8 / max(len(rules), 1)
    wide = max(4.0, 0.25 * len(groups) * (len(rules) + 1))
    figure = new_figure(wide * len(temperatures), 1 + 2.2 * len(names))
    panels = figure.subplots(
        len(names), len(temperatures), squeeze=False, sharex=True, sharey="row"
    )
    for (down, name), (right, temperature) in itertools.product(
        enumerate(names), enumerate(temperatures)
    ):
        axes = panels[down, right]
        for number, rule in enumerate(rules):
            mine = [row for row in rows if (row["temperature"], row["rule"]) == (temperature, rule)]
            known = [row for row in mine if row[name] is not None]
            across = [groups.index(_group(row)) + (number + 0.5) * thick - 0.4 for row in known]
            exact = all(row["exact"] for row in mine)
            axes.bar(
                across, [_value(row[name]) for row in known], thick, color=f"C{number}",
                hatch=None if exact else "//", label=rule if exact else f"{rule} (exact=False)",
            )  # fmt: skip
        if name != "alpha":  # plain decoding
            axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
        axes.set_xticks(range(len(groups)), groups, rotation=45, ha="right")
        if down == 0:
            axes.set_title(f"temperature {temperature:g}")
        if right == 0:
            axes.set_ylabel(_FIGURES[name])
    if rows:
        panels[0, 0].legend(fontsize=7)
    return figure


def evaluation(report: Mapping[str, Any]) -> Figure:
    """Draws a report of `specjax evaluate`: the mean scores, and the differences to the first.

    The bars are 95 % intervals.  Those of differences are paired, and so the shorter ones.

    Returns:
      A matplotlib `Figure`.

    Raises:
      ImportError: matplotlib is not installed.
    """
    rows = report["checkpoints"]
    names = [row["checkpoint"] for row in rows]
    figure = new_figure(2 + 0.6 * len(rows), 5)
    above, below = figure.subplots(2, 1, sharex=True)
    means = [(row["mean"], *(row["interval"] or (row["mean"],) * 2)) for row in rows]
    gains = [row["to_first"] or (row["mean"] - rows[0]["mean"],) * 3 for row in rows]
    for axes, points, label in ((above, means, "score"), (below, gains, "over the first")):
        middle, low, high = np.array(points).T
        axes.errorbar(range(len(rows)), middle, (middle - low, high - middle), fmt="o-", capsize=3)
        axes.set_ylabel(label)
    below.axhline(0, color="black", linewidth=0.8, linestyle=":")
    below.set_xticks(range(len(rows)), names, rotation=45, ha="right")
    return figure


def _value(figure: float | Sequence[float]) -> float:
    """Returns the figure without its interval."""
    return figure[0] if isinstance(figure, Sequence) else figure


def _group(row: Mapping[str, Any]) -> str:
    """Returns the label of a group: the proposer with its branching or its number of drafts."""
    tree = row.get("branching")
    return f"{row['proposer']} {','.join(map(str, tree)) if tree else row['num_drafts']}"


def new_figure(width: float = 4, height: float = 3) -> Figure:
    """Makes an empty figure; sizes are in inches.  Raises ImportError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(f"drawing needs matplotlib: {install('plot')}") from None
    return Figure(figsize=(width, height), layout="constrained")


def _layout(parent: np.ndarray) -> tuple[dict[int, int], dict[int, float]]:
    """Returns depth and height of the present nodes; leaves are stacked, parents centred."""
    depth = {0: 0}
    children: dict[int, list[int]] = {0: []}
    for node in range(1, len(parent)):
        if int(parent[node]) in depth:  # an absent node has no children either
            depth[node], children[node] = depth[int(parent[node])] + 1, []
            children[int(parent[node])].append(node)
    height: dict[int, float] = {}

    def set_height(node: int) -> None:
        for child in children[node]:
            set_height(child)
        below = [height[child] for child in children[node]]
        height[node] = (
            float(np.mean(below)) if below else float(sum(not children[n] for n in height))
        )

    set_height(0)
    return depth, height
