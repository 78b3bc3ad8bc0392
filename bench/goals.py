"""python -m bench.goals: this project's goals on a CPU, and whether each is met or missed.

Every figure is a ratio from one run of `python -m bench`; `RUNS` has the arguments.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Callable

from bench.__main__ import check, measure, parser, table
from bench.command import Report, run

_IMPOSED = "--synthetic-acceptance 0.8"
RUNS = {
    "110M f32": f"--size 110m {_IMPOSED} --num-drafts 1 2 4 6 8 --peers plain draft",
    "850M f32": f"--size 850m {_IMPOSED} --num-drafts 4 --peers plain",
    "110M bf16": f"--size 110m --dtype bfloat16 {_IMPOSED} --num-drafts 4 --compiled",
    "110M f32 batch 8": f"--size 110m {_IMPOSED} --num-drafts 4 --batch 8 --peers plain",
    "110M bf16 batch 8": (
        f"--size 110m --dtype bfloat16 {_IMPOSED} --num-drafts 4 --batch 8 --peers plain"
    ),
    "shipped pair": "--peers",
}
_QUICK = "--size tiny --vocab-size 512 --new-tokens 16 --rounds 1"


class Rows:
    """The rows of one run."""

    def __init__(self, report: Report) -> None:
        self.rows: list[Report] = report["rows"]

    def row(self, library: str, proposer: str, num_drafts: int = 0) -> Report:
        """The row of a contestant, or {} if it was left out."""
        key = library, proposer, num_drafts
        return next(
            (r for r in self.rows if (r["library"], r["proposer"], r["num_drafts"]) == key), {}
        )

    def ours(self, proposer: str, what: str, num_drafts: int = 0) -> float | None:
        return self.row("specjax", proposer, num_drafts).get(what)

    def times(self, proposer: str, other: str, gamma: int = 0, its: int = 0) -> float | None:
        """specjax over transformers in tokens/s; None if either has no clean sample."""
        mine = self.row("specjax", proposer, gamma).get("tokens_per_second")
        peer = self.row("transformers", other, its).get("tokens_per_second")
        return mine / peer if mine and peer else None

    def least_parts(self) -> float | None:
        """The least `parts_over_step` of all proposers."""
        ratios = (r["parts_over_step"] for r in self.rows if r.get("parts_over_step"))
        return min(ratios, default=None)

    def best(self) -> float | None:
        """The speed-up of the best proposer over plain decoding."""
        speedups = (
            r["speedup"]
            for r in self.rows
            if r["library"] == "specjax" and r["num_drafts"] and r["speedup"]
        )
        return max(speedups, default=None)


@dataclasses.dataclass(frozen=True)
class Goal:
    case: str
    run: str
    goal: float
    value: Callable[[Rows], float | None]


def _goals() -> list[Goal]:
    goals = []
    for size in ("110M", "850M"):
        run = f"{size} f32"
        goals += [
            Goal(f"{run}, plain, over transformers", run, 2.2,
                 lambda r: r.times("plain", "plain")),
            Goal(f"{run}, imposed 0.8, 4 drafts, over plain", run, 2.7,
                 lambda r: r.ours("draft", "speedup", 4)),
            Goal(f"{run}, plain, share of the bandwidth", run, 0.75,
                 lambda r: r.ours("plain", "share_of_bandwidth")),
            Goal(f"{run}, least parts over step", run, 0.92, Rows.least_parts),
        ]  # fmt: skip
    wide, half = "110M f32 batch 8", "110M bf16 batch 8"
    goals += [
        Goal("110M f32, assisted, over transformers", "110M f32", 3,
             lambda r: r.times("draft", "draft", 4, 4)),
        Goal("110M bf16, plain, over a compiled one", "110M bf16", 1.2,
             lambda r: r.times("plain", "plain compiled")),
        Goal("110M bf16, assisted, over transformers", "110M bf16", 1.4,
             lambda r: r.times("draft", "draft", 4, 4)),
        Goal("110M bf16, prompt lookup, over transformers", "110M bf16", 1.4,
             lambda r: r.times("ngram", "ngram", 4, 4)),
        Goal(f"{wide}, assisted, over transformers plain", wide, 2.5,
             lambda r: r.times("draft", "plain", 4)),
        Goal(f"{half}, assisted, over transformers plain", half, 2.5,
             lambda r: r.times("draft", "plain", 4)),
        Goal("shipped pair, best proposer over plain", "shipped pair", 2, Rows.best),
    ]  # fmt: skip
    return goals


GOALS = _goals()


def main(argv: list[str] | None = None) -> None:
    made = argparse.ArgumentParser(prog="python -m bench.goals", description=__doc__)
    made.add_argument(
        "--only", nargs="+", choices=list(RUNS), default=list(RUNS), help="only these runs"
    )
    made.add_argument(
        "--quick", action="store_true", help="use tiny models, to see that everything runs"
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
    """The arguments of `python -m bench` for this run."""
    words = [
        *RUNS[name].split(),
        "--rounds",
        str(arguments.rounds),
        "--new-tokens",
        str(arguments.new_tokens),
    ]
    if arguments.quick:
        words += [*_QUICK.split(), "--limit-prompts", "2"]
    chosen = parser().parse_args(words)
    check(chosen)
    chosen.batch, chosen.vocab_size = chosen.batch[0], chosen.vocab_size[0]
    return chosen


def judge(goal: Goal, report: Report) -> Report:
    """A row of the table; the verdict is `open` if a side of the ratio has no clean sample."""
    measured = goal.value(Rows(report))
    verdict = "open" if measured is None else "met" if measured >= goal.goal else "missed"
    return {"case": goal.case, "measured": measured, "goal": goal.goal, "verdict": verdict}


if __name__ == "__main__":
    run(main)
