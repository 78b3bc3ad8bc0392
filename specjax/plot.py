"""Pictures: a proposal tree with its acceptance.  Drawing needs matplotlib (`pip install specjax[plot]`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.types import ABSENT


def tree(parent: Any, acceptance: Any = None, labels: Sequence[str] | None = None, path: Any = None) -> Any:
    """Draw a tree from left to right; the thickness of an edge and the number on it are its acceptance.

    Args:
      parent: [N] as in `Proposal`; absent nodes are left out.
      acceptance: [N] how often a node was accepted where its parent was, in [0, 1]; NaN where that is not known.
      labels: [N] texts, such as tokens; by default the numbers of the nodes.
      path: nodes to mark, such as those that were accepted.

    Returns:
      A matplotlib `Figure`; `savefig` writes it.

    Raises:
      ValueError: lengths that differ, a parent behind its child, or an acceptance outside [0, 1].
      ImportError: without matplotlib.
    """
    parent = np.asarray(parent)
    count = len(parent)
    values = np.full(count, np.nan) if acceptance is None else np.asarray(acceptance, float)
    texts = [str(n) for n in range(count)] if labels is None else list(labels)
    if parent.ndim != 1 or not (len(values) == len(texts) == count):
        raise ValueError(
            f"parent has shape {list(parent.shape)}, acceptance {len(values)} and labels {len(texts)} entries: "
            "pass one of each a node"
        )
    if (parent >= np.arange(count)).any() or (parent < ABSENT).any():
        raise ValueError(f"parent={parent.tolist()}; every node stands behind its parent, and {ABSENT} is none")
    if ((values < 0) | (values > 1)).any():
        raise ValueError(f"acceptance={values.tolist()}; probabilities lie in [0, 1]")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("drawing needs matplotlib: pip install 'specjax[plot]'") from None

    depth, height = _places(parent)
    rows = max(height.values()) + 1
    figure = Figure(figsize=(2 + 1.6 * (max(depth.values()) + 1), 1 + 0.4 * rows), layout="constrained")
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
                axes.text(*middle, f"{chance:.2f}", fontsize=7, ha="center", va="center", bbox=blank)
        box = {"boxstyle": "round", "facecolor": "white", "edgecolor": "C1" if node in marked else "C0"}
        axes.text(depth[node], height[node], texts[node], fontsize=8, ha="center", va="center", bbox=box, zorder=2)
    axes.invert_yaxis()
    axes.margins(0.1)
    return figure


def _places(parent: np.ndarray) -> tuple[dict[int, int], dict[int, float]]:
    """Depth and height of the nodes that are there: leaves below each other, a parent in the middle of its children."""
    depth = {0: 0}
    children: dict[int, list[int]] = {0: []}
    for node in range(1, len(parent)):
        if int(parent[node]) in depth:  # an absent node has no children either
            depth[node], children[node] = depth[int(parent[node])] + 1, []
            children[int(parent[node])].append(node)
    height: dict[int, float] = {}

    def place(node):
        for child in children[node]:
            place(child)
        below = [height[child] for child in children[node]]
        height[node] = float(np.mean(below)) if below else float(sum(not children[n] for n in height))

    place(0)
    return depth, height
