"""python -m bench.goals: what this project wants to reach on a CPU, row by row: measured, goal, met or missed.

Every figure is a ratio from one run of `python -m bench`, whose arguments stand in `RUNS`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

from bench.__main__ import check, measure, parser, table
from bench.command import run

_IMPOSED = "--synthetic-acceptance 0.8"
RUNS = {
    "110M f32": f"--size 110m {_IMPOSED} --num-drafts 1 2 4 6 8 --peers plain draft",
    "850M f32": f"--size 850m {_IMPOSED} --num-drafts 4 --peers plain",
    "110M bf16": f"--size 110m --dtype bfloat16 {_IMPOSED} --num-drafts 4 --compiled",
    "110M f32 batch 8": f"--size 110m {_IMPOSED} --num-drafts 4 --batch 8 --peers plain",
    "110M bf16 batch 8": f"--size 110m --dtype bfloat16 {_IMPOSED} --num-drafts 4 --batch 8 --peers plain",
    "shipped pair": "--peers",
}
_QUICK = "--size tiny --vocab-size 512 --new-tokens 16 --rounds 1"


class Report:
    """What one run found."""

    def __init__(self, found: dict[str, Any]):
        self.rows = found["rows"]

    def row(self, library: str, proposer: str, num_drafts: int = 0) -> dict[str, Any]:
        """{} where it was left out."""
        key = library, proposer, num_drafts
        return next(
            (r for r in self.rows if (r["library"], r["proposer"], r["num_drafts"]) == key), {}
        )

    def ours(self, proposer: str, what: str, num_drafts: int = 0) -> float | None:
        return self.row("specjax", proposer, num_drafts).get(what)

    def times(self, proposer: str, other: str, gamma: int = 0, its: int = 0) -> float | None:
        """specjax over transformers, in tokens/s; None where one of them has no clean sample."""
        mine = self.row("specjax", proposer, gamma).get("tokens_per_second")
        peer = self.row("transformers", other, its).get("tokens_per_second")
        return mine / peer if mine and peer else None

    def least_parts(self) -> float | None:
        """Of what guesses: the parts of a step, measured alone, over the step."""
        found = (r["parts_over_step"] for r in self.rows if r.get("parts_over_step"))
        return min(found, default=None)

    def best(self) -> float | None:
        """Speed-up of the best proposer over plain decoding."""
        found = (
            r["speedup"]
            for r in self.rows
            if r["library"] == "specjax" and r["num_drafts"] and r["speedup"]
        )
        return max(found, default=None)


@dataclasses.dataclass(frozen=True)
class Goal:
    case: str
    run: str
    goal: float
    value: Callable[[Report], float | None]


def _goals() -> list[Goal]:
    found = []
    for size in ("110M", "850M"):
        run = f"{size} f32"
        found += [
            Goal(f"{run}, plain, over transformers", run, 2.2, lambda r: r.times("plain", "plain")),
            Goal(f"{run}, imposed 0.8, 4 guesses, over plain", run, 2.7, lambda r: r.ours("draft", "speedup", 4)),
            Goal(f"{run}, plain, share of the bandwidth", run, 0.75, lambda r: r.ours("plain", "share_of_bandwidth")),
            Goal(f"{run}, least parts over step", run, 0.92, Report.least_parts),
        ]  # fmt: skip
    wide, half = "110M f32 batch 8", "110M bf16 batch 8"
    found += [
        Goal("110M f32, assisted, over transformers", "110M f32", 3, lambda r: r.times("draft", "draft", 4, 4)),
        Goal("110M bf16, plain, over a compiled one", "110M bf16", 1.2, lambda r: r.times("plain", "plain compiled")),
        Goal("110M bf16, assisted, over transformers", "110M bf16", 1.4, lambda r: r.times("draft", "draft", 4, 4)),
        Goal("110M bf16, lookup, over transformers", "110M bf16", 1.4, lambda r: r.times("ngram", "ngram", 4, 4)),
        Goal(f"{wide}, assisted, over transformers plain", wide, 2.5, lambda r: r.times("draft", "plain", 4)),
        Goal(f"{half}, assisted, over transformers plain", half, 2.5, lambda r: r.times("draft", "plain", 4)),
        Goal("shipped pair, best proposer over plain", "shipped pair", 2, Report.best),
    ]  # fmt: skip
    return found


GOALS = _goals()


def main(argv: list[str] | None = None) -> None:
    made = argparse.ArgumentParser(prog="python -m bench.goals", description=__doc__)
    made.add_argument(
        "--only", nargs="+", choices=list(RUNS), default=list(RUNS), help="these runs"
    )
    made.add_argument(
        "--quick", action="store_true", help="tiny models: shows that it runs, and measures nothing"
    )
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--new-tokens", type=int, default=128)
    made.add_argument("--json", help="write the reports and the goals to this file")
    arguments = made.parse_args(argv)
    reports, rows = {}, []
    for name in arguments.only:
        reports[name] = measure(settings(name, arguments))
        print(f"{name}: python -m bench {RUNS[name]}\n\n{table(reports[name])}\n", flush=True)
        rows += [judge(goal, reports[name]) for goal in GOALS if goal.run == name]
    print("| case | measured | goal | |\n|---|---|---|---|")
    for row in rows:
        measured = "" if row["measured"] is None else f"{row['measured']:.2f}"
        print(f"| {row['case']} | {measured} | {row['goal']:.2f} | {row['verdict']} |")
    if arguments.json:
        pathlib.Path(arguments.json).write_text(
            json.dumps({"goals": rows, "reports": reports}, indent=1)
        )


def settings(name: str, arguments: argparse.Namespace) -> argparse.Namespace:
    """The arguments of `python -m bench` for a run."""
    words = [
        *RUNS[name].split(),
        "--rounds",
        str(arguments.rounds),
        "--new-tokens",
        str(arguments.new_tokens),
    ]
    if arguments.quick:
        words += [*_QUICK.split(), "--limit-prompts", "2"]
    found = parser().parse_args(words)
    check(found)
    found.batch, found.vocab_size = found.batch[0], found.vocab_size[0]
    return found


def judge(goal: Goal, report: dict[str, Any]) -> dict[str, Any]:
    """A row of the table; `open` where a side of the ratio has no clean sample."""
    measured = goal.value(Report(report))
    verdict = "open" if measured is None else "met" if measured >= goal.goal else "missed"
    return {"case": goal.case, "measured": measured, "goal": goal.goal, "verdict": verdict}


if __name__ == "__main__":
    run(main)
