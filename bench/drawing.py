"""A picture of the reports of `python -m bench`: speed against the number of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bench.command import Report
from specjax.plot import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_VARIES = ("batch", "prompt_length", "vocab_size")


def draw(reports: Sequence[Report]) -> Figure:
    """Draw tokens/s above and the speed-up over specjax's plain decoding below.

    Each report has a column, and each contestant its colour.  Full lines are measured.  Dotted
    lines are the speed if a step took only as long as its parts do alone.  Contestants that do not
    draft are dashed horizontal lines.
    """
    figure = new_figure(2 + 4 * len(reports), 7)
    panels = figure.subplots(2, len(reports), squeeze=False, sharex=True, sharey="row")
    varies = [
        name for name in _VARIES if len({report["arguments"][name] for report in reports}) > 1
    ]
    names = dict.fromkeys(_name(row) for report in reports for row in report["rows"] if _shown(row))
    colours = {name: f"C{number % 10}" for number, name in enumerate(names)}
    for column, report in zip(panels.T, reports, strict=True):
        column[0].set_title(
            ", ".join(f"{name} {report['arguments'][name]}" for name in varies), fontsize=9
        )
        column[1].set_xlabel("drafts")
        for name, colour in colours.items():
            rows = [row for row in report["rows"] if _name(row) == name and row["speedup"]]
            for axes, value in zip(column, ("tokens_per_second", "speedup"), strict=True):
                drafting = [row for row in rows if row["num_drafts"]]
                for row in rows:
                    if not row["num_drafts"]:
                        axes.axhline(
                            row[value], color=colour, linewidth=0.8, linestyle="--", label=name
                        )
                if drafting:
                    lookaheads = [row["num_drafts"] for row in drafting]
                    axes.plot(
                        lookaheads,
                        [row[value] for row in drafting],
                        color=colour,
                        marker="o",
                        label=name,
                    )
                    axes.set_xticks(lookaheads)
                known = [row for row in drafting if row.get("parts_over_step")]
                by_parts = [row[value] / row["parts_over_step"] for row in known]
                axes.plot(
                    [row["num_drafts"] for row in known], by_parts, color=colour, linestyle=":"
                )
    panels[0, 0].set_ylabel("tokens/s")
    panels[1, 0].set_ylabel("times plain; dotted: if a step took as long as its parts")
    panels[0, 0].legend(fontsize=7)
    return figure


def _name(row: Report) -> str:
    return f"{row['library']} {row['proposer']}"


def _shown(row: Report) -> bool:
    """Plain passes that are only measured as a cost are not drawn."""
    return not row["proposer"].startswith("plain at") and "alone" not in row["proposer"]
