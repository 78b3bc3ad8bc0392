"""The drawings of the pages under docs/concepts.

mkdocs makes them when the site is built.  `python docs/drawings.py FOLDER` writes them as PNG.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from specjax import plot
from specjax.tree import ancestor_mask

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TARGET, DRAFT, GREY = "C0", "C1", "0.6"
"""The target's parts are blue, drafts are orange, and what is dropped is grey, in all drawings."""

PARENT = (-1, 0, 0, 0, 1, 1, 2, 4, 4)
WORDS = ("return", " a", " self", " x", " +", ".", ".", " b", " 1")
ACCEPTED = (0, 1, 4, 7)
"""A step that is drawn: its tree as in `Proposal.parent`, its tokens, and the accepted path."""


def loop() -> Figure:
    """The loop of decoding, with what passes from one function to the next."""
    figure, axes = _canvas(9, 3)
    boxes = {
        "prefill": (0.0, "reads the prompt"),
        "propose": (2.6, "drafts a tree"),
        "verify": (5.2, "one pass of the target"),
        "commit": (7.8, "keeps a path"),
    }
    for name, (x, what) in boxes.items():
        colour = DRAFT if name == "propose" else TARGET
        _box(axes, x, 0, 1.6, 0.9, name, what, colour)
    for start, end, label in (
        (1.6, 2.6, "state"),
        (4.2, 5.2, "Proposal"),
        (6.8, 7.8, "Verification"),
    ):
        _arrow(axes, (start, 0.45), (end, 0.45))
        axes.text((start + end) / 2, 0.55, label, ha="center", fontsize=9)
    _arrow(axes, (9.4, 0.45), (10.3, 0.45))
    axes.text(10.35, 0.45, "tokens", va="center", fontsize=9)
    axes.plot([8.6, 8.6, 3.4], [0, -0.7, -0.7], color="black", linewidth=1)
    _arrow(axes, (3.4, -0.7), (3.4, 0))
    axes.text(
        6, -0.62, "DecodeState: the pending token,\nthe KV caches, the key of each row",
        ha="center", fontsize=9,
    )  # fmt: skip
    axes.add_patch(_rectangle(2.3, -1.0, 7.4, 2.3, edgecolor=GREY, linestyle="--"))
    axes.text(9.65, 1.12, "one lax.while_loop, on the device", ha="right", fontsize=9, color="0.4")
    axes.set_xlim(-0.1, 11)
    axes.set_ylim(-1.1, 1.4)
    return figure


def tree() -> Figure:
    """A tree of drafts with the accepted path, as `specjax.plot.tree` draws it."""
    figure = plot.tree(PARENT, labels=[repr(word) for word in WORDS], path=ACCEPTED)
    (axes,) = figure.axes
    axes.set_title("orange: the pending token and the accepted drafts", fontsize=9)
    return figure


def mask() -> Figure:
    """Which nodes of the tree each node attends to."""
    figure, axes = _canvas(4.6, 4.2)
    seen = np.asarray(ancestor_mask(np.array(PARENT, np.int32)))
    for (row, column), visible in np.ndenumerate(seen):
        colour = TARGET if visible else "white"
        axes.add_patch(_rectangle(column, row, 1, 1, facecolor=colour, edgecolor=GREY))
    for node, word in enumerate(WORDS):
        axes.text(-0.2, node + 0.5, repr(word), ha="right", va="center", fontsize=9)
        axes.text(node + 0.5, -0.2, repr(word), ha="left", va="bottom", rotation=55, fontsize=9)
    axes.text(len(WORDS) / 2, len(WORDS) + 0.7, "a row: what this node attends to", ha="center")
    axes.set_xlim(-2.5, len(WORDS) + 1.2)
    axes.set_ylim(len(WORDS) + 1.1, -2.2)
    axes.set_aspect("equal")
    return figure


def cache() -> Figure:
    """The slots of a KV cache before a pass, after it, and after the commit."""
    figure, axes = _canvas(9, 3.6)
    text = ["def", " add", "(", "…", ")", ":"]
    kept = [WORDS[node] for node in ACCEPTED]
    empty = 16
    rows = (
        ("before the pass", text, [TARGET] * len(text), f"length = {len(text)}"),
        (
            "staged by the pass",
            [*text, *WORDS],
            [TARGET] * len(text) + [DRAFT] * len(WORDS),
            f"length = {len(text)}: the tree lies behind it",
        ),
        (
            "after the commit",
            [*text, *kept, *WORDS[len(kept) :]],
            [TARGET] * (len(text) + len(kept)) + [GREY] * (len(WORDS) - len(kept)),
            f"length = {len(text) + len(kept)}: what is grey will be overwritten",
        ),
    )
    for down, (name, slots, colours, length) in enumerate(rows):
        y = -1.7 * down
        axes.text(-0.2, y + 0.4, name, ha="right", va="center", fontsize=10)
        for slot in range(empty):
            filled = slot < len(slots)
            axes.add_patch(
                _rectangle(
                    slot, y, 0.94, 0.8, facecolor=colours[slot] if filled else "white",
                    edgecolor=GREY, alpha=0.45,
                )
            )  # fmt: skip
            if filled:
                axes.text(slot + 0.47, y + 0.4, slots[slot].strip(), ha="center", va="center",
                          fontsize=8)  # fmt: skip
        committed = len(text) + (len(kept) if down == 2 else 0)
        axes.plot([committed - 0.03] * 2, [y - 0.15, y + 0.95], color="black", linewidth=2)
        axes.text(committed + 0.1, y - 0.35, length, fontsize=8)
    axes.set_xlim(-3.4, empty + 0.2)
    axes.set_ylim(-4.0, 1.1)
    return figure


def match() -> Figure:
    """Logits of target and draft, and with the noise of two positions added."""
    random = np.random.default_rng(42)
    words = ["self", "x", "a", "None", "0", "data"]
    target = np.array([2.2, 1.6, 1.4, 0.4, 0.2, -0.3])
    draft = target + 0.5 * random.normal(size=len(words))
    figure = plot.new_figure(10, 3.2)
    panels = figure.subplots(1, 3, sharey=True)
    place = np.arange(len(words))
    for number, axes in enumerate(panels):
        noise = random.gumbel(size=len(words)) if number else np.zeros(len(words))
        best = {}
        for name, values, colour, side in (
            ("target", target + noise, TARGET, -0.2),
            ("draft", draft + noise, DRAFT, 0.2),
        ):
            axes.bar(place + side, values, 0.38, color=colour, label=name, alpha=0.75)
            best[name] = int(values.argmax())
            axes.plot(best[name] + side, values.max() + 0.25, "v", color=colour, markersize=9)
        verdict = "accepted" if best["target"] == best["draft"] else "rejected"
        title = f"with the noise of position {number}: {verdict}" if number else "logits"
        axes.set_title(title, fontsize=10)
        axes.set_xticks(place, words, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(fontsize=8)
    panels[1].set_xlabel("a mark is the greatest bar of its colour", fontsize=9)
    return figure


def rejection() -> Figure:
    """How `rejection` puts the target's distribution together from drafts and the residual."""
    p = np.array([0.36, 0.24, 0.16, 0.12, 0.08, 0.04])
    q = np.array([0.20, 0.36, 0.10, 0.22, 0.06, 0.06])
    both, rest = np.minimum(p, q), np.maximum(p - q, 0)
    place = np.arange(len(p))
    figure = plot.new_figure(9, 3.2)
    left, right = figure.subplots(1, 2, sharey=True)
    left.bar(place - 0.2, p, 0.38, color=TARGET, label="target, p", alpha=0.75)
    left.bar(place + 0.2, q, 0.38, color=DRAFT, label="draft, q", alpha=0.75)
    left.set_title("what each would say", fontsize=10)
    right.bar(place, both, 0.6, color=DRAFT, alpha=0.75, label=f"accepted, {both.sum():.2f}")
    right.bar(place, rest, 0.6, bottom=both, color=TARGET, alpha=0.75,
              label=f"drawn after a rejection, {rest.sum():.2f}")  # fmt: skip
    right.set_title("what is emitted: p again", fontsize=10)
    for axes in (left, right):
        axes.set_xticks(place, [f"token {n + 1}" for n in place], fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8)
    return figure


DRAWINGS: dict[str, Callable[[], Figure]] = {
    "loop": loop,
    "tree": tree,
    "mask": mask,
    "cache": cache,
    "match": match,
    "rejection": rejection,
}
"""Names of the files, without their ending."""


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    figure = plot.new_figure(width, height)
    axes = figure.add_subplot()
    axes.set_axis_off()
    return figure, axes


def _rectangle(x: float, y: float, width: float, height: float, **style: object):
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, **{"facecolor": "none", **style})


def _box(
    axes: Axes, x: float, y: float, width: float, height: float, name: str, what: str, colour: str
) -> None:
    axes.add_patch(_rectangle(x, y, width, height, facecolor=colour, alpha=0.3, edgecolor=colour))
    axes.text(x + width / 2, y + 0.58 * height, name, ha="center", va="center", weight="bold")
    axes.text(x + width / 2, y + 0.25 * height, what, ha="center", va="center", fontsize=8)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "->"})


if __name__ == "__main__":
    for _name, _draw in DRAWINGS.items():
        _draw().savefig(pathlib.Path(sys.argv[1]) / f"{_name}.png", dpi=120)
