"""python -m bench.goals: this project's goals on a CPU, and whether each is met or missed.

Every figure is a ratio from one run of `python -m bench`; `RUNS` has the arguments.  Goals over the
fastest peer stay open unless `--engines` lets llama.cpp or OpenVINO take part.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable

from bench.__main__ import check, measure, table
from bench.command import Report, run
from bench.contestants import ROUNDED
from bench.options import BenchOptions, ReportOptions
from bench.peers.engines import ENGINES
from bench.report import ratio
from specjax.measure import Interval, show
from specjax.options import fields
from specjax.options.command import parse

_IMPOSED = "--synthetic-acceptance 0.8"
RUNS = {
    "110M f32": f"--size 110m {_IMPOSED} --num-drafts 1 2 4 6 8 --compiled --int8",
    "850M f32": f"--size 850m {_IMPOSED} --num-drafts 4 --peers plain",
    "110M bf16": f"--size 110m --dtype bfloat16 {_IMPOSED} --num-drafts 4 --compiled",
    "110M f32 batch 8": f"--size 110m {_IMPOSED} --num-drafts 4 --batch 8 --peers plain",
    "110M bf16 batch 8": (
        f"--size 110m --dtype bfloat16 {_IMPOSED} --num-drafts 4 --batch 8 --peers plain"
    ),
    "shipped pair": "",
}
_QUICK = "--size tiny --vocab-size 512 --new-tokens 16 --rounds 1"


@dataclasses.dataclass(frozen=True)
class Judged:
    """A measured ratio with its 95 % interval, and the peer that it is over, if any."""

    value: Interval
    peer: str = ""


class Rows:
    """The rows of one run; its methods give None where a side has no clean sample."""

    def __init__(self, report: Report) -> None:
        self.rows: list[Report] = report["rows"]

    def row(self, proposer: str, num_drafts: int = 0, library: str = "specjax") -> Report:
        """The row of a contestant, by default one of ours, or {} if it was left out."""
        key = library, proposer, num_drafts
        return next(
            (r for r in self.rows if (r["library"], r["proposer"], r["num_drafts"]) == key), {}
        )

    def over_plain(self, proposer: str, num_drafts: int) -> Judged | None:
        """Times our own plain decoding."""
        plain, mine = self.row("plain"), self.row(proposer, num_drafts)
        known = _known(plain) and _known(mine)
        return Judged(ratio(plain["seconds"], mine["seconds"])) if known else None

    def over_transformers(
        self, proposer: str, other: str, num_drafts: int = 0, its: int = 0
    ) -> Judged | None:
        """Times a way of transformers, with `its` drafts."""
        mine, peer = self.row(proposer, num_drafts), self.row(other, its, "transformers")
        known = _known(mine) and _known(peer)
        return Judged(ratio(peer["seconds"], mine["seconds"]), "transformers") if known else None

    @property
    def with_engines(self) -> bool:
        """Did an engine take part?  Without one the fastest peer is not known."""
        return any(r["library"] in ENGINES for r in self.rows)

    def over_peer(self, proposer: str, num_drafts: int = 0) -> Judged | None:
        """Times the fastest peer that decodes in the same way."""
        mine = self.row(proposer, num_drafts)
        known = self.with_engines and mine.get("over_peer")
        return Judged(mine["over_peer"], mine["peer"]) if known else None

    def over_best(self, proposer: str, num_drafts: int) -> Judged | None:
        """Times the fastest peer in whichever way it is fastest, in the same precision."""
        mine = self.row(proposer, num_drafts)
        peers = [
            r
            for r in self.rows
            if r["library"] != "specjax" and r["proposer"] not in ROUNDED.values() and _known(r)
        ]
        if not self.with_engines or not peers or not _known(mine):
            return None
        best = max(peers, key=_speed)
        way = f"{best['library']} {best['proposer']} {best['num_drafts'] or ''}".strip()
        return Judged(ratio(best["seconds"], mine["seconds"]), way)

    def best_lookup(self) -> Judged | None:
        """Our best prompt lookup over the best one of a peer."""
        ours, theirs = (
            [
                r
                for r in self.rows
                if r["proposer"] == "ngram" and (r["library"] == "specjax") == mine and _known(r)
            ]
            for mine in (True, False)
        )
        if not self.with_engines or not ours or not theirs:
            return None
        one, other = (max(rows, key=_speed) for rows in (ours, theirs))
        return Judged(
            ratio(other["seconds"], one["seconds"]), f"{other['library']} {other['num_drafts']}"
        )

    def share(self) -> Judged | None:
        """The time to read every weight over the time of a step of plain decoding."""
        return _point(self.row("plain").get("share_of_bandwidth"))

    def least_parts(self) -> Judged | None:
        """The least `parts_over_step` of all proposers."""
        ratios = (r["parts_over_step"] for r in self.rows if r.get("parts_over_step"))
        return _point(min(ratios, default=None))

    def best(self) -> Judged | None:
        """The best proposer over plain decoding."""
        drafting = [
            r for r in self.rows if r["library"] == "specjax" and r["num_drafts"] and _known(r)
        ]
        if not drafting:
            return None
        best = max(drafting, key=_speed)
        return self.over_plain(best["proposer"], best["num_drafts"])


def _known(row: Report) -> bool:
    return bool(row.get("tokens_per_second"))


def _speed(row: Report) -> float:
    return row["tokens_per_second"]


def _point(value: float | None) -> Judged | None:
    """A ratio of medians of steps, which has no interval."""
    return None if value is None else Judged((value, value, value))


@dataclasses.dataclass(frozen=True)
class Goal:
    case: str
    run: str
    goal: float
    value: Callable[[Rows], Judged | None]


def _goals() -> list[Goal]:
    goals = []
    for size in ("110M", "850M"):
        run = f"{size} f32"
        goals += [
            Goal(f"{run}, plain, over transformers", run, 2.2,
                 lambda r: r.over_transformers("plain", "plain")),
            Goal(f"{run}, plain, over the fastest peer", run, 1.0, lambda r: r.over_peer("plain")),
            Goal(f"{run}, imposed 0.8, 4 drafts, over plain", run, 2.7,
                 lambda r: r.over_plain("draft", 4)),
            Goal(f"{run}, plain, share of the bandwidth", run, 0.75, Rows.share),
            Goal(f"{run}, least parts over step", run, 0.92, Rows.least_parts),
        ]  # fmt: skip
    goals += [
        Goal("110M f32, assisted, over transformers", "110M f32", 3,
             lambda r: r.over_transformers("draft", "draft", 4, 4)),
        Goal("110M bf16, plain, over a compiled one", "110M bf16", 1.2,
             lambda r: r.over_transformers("plain", "plain compiled")),
        Goal("110M bf16, assisted, over transformers", "110M bf16", 1.4,
             lambda r: r.over_transformers("draft", "draft", 4, 4)),
        Goal("110M bf16, prompt lookup, over transformers", "110M bf16", 1.4,
             lambda r: r.over_transformers("ngram", "ngram", 4, 4)),
        Goal("110M f32, imposed 0.8, 4 drafts, over the peers' best", "110M f32", 1.3,
             lambda r: r.over_best("draft", 4)),
        Goal("110M int8, plain, over the fastest peer", "110M f32", 0.8,
             lambda r: r.over_peer(ROUNDED["int8"])),
        Goal("110M bf16, plain, over the fastest peer", "110M bf16", 0.9,
             lambda r: r.over_peer("plain")),
        Goal("110M bf16, imposed 0.8, 4 drafts, over the peers' best", "110M bf16", 1.3,
             lambda r: r.over_best("draft", 4)),
    ]  # fmt: skip
    for run in ("110M f32 batch 8", "110M bf16 batch 8"):
        goals += [
            Goal(f"{run}, assisted, over transformers plain", run, 2.5,
                 lambda r: r.over_transformers("draft", "plain", 4)),
            Goal(f"{run}, imposed 0.8, 4 drafts, over the peers' best", run, 1.3,
                 lambda r: r.over_best("draft", 4)),
        ]  # fmt: skip
    goals += [
        Goal("shipped pair, plain, over the fastest peer", "shipped pair", 1.0,
             lambda r: r.over_peer("plain")),
        Goal("shipped pair, prompt lookup, over the best of a peer", "shipped pair", 1.0,
             Rows.best_lookup),
        Goal("shipped pair, best proposer over plain", "shipped pair", 2, Rows.best),
    ]  # fmt: skip
    return goals


GOALS = _goals()


@dataclasses.dataclass(frozen=True)
class GoalsOptions(fields.Options):
    """The options of `python -m bench.goals`."""

    only: tuple[str, ...] = fields.option(tuple(RUNS), "only these runs", choices=list(RUNS))
    quick: bool = fields.option(False, "use tiny models, to see that everything runs")
    engines: tuple[str, ...] = fields.option((), "as of python -m bench", choices=tuple(ENGINES))
    engine_python: str | None = fields.option(None, "as of python -m bench")
    rounds: int = fields.option(5, "measured turns")
    new_tokens: int = fields.option(128, "tokens of a text")
    json: str | None = fields.option(None, "write the reports and the goals to this file")


def main(argv: list[str] | None = None) -> None:
    arguments = parse(GoalsOptions, argv, __doc__, "python -m bench.goals")
    reports, rows = {}, []
    for name in arguments.only:
        reports[name] = measure(settings(name, arguments))
        print(f"{name}: python -m bench {RUNS[name]}\n\n{table(reports[name])}\n", flush=True)
        rows += [judge(goal, reports[name]) for goal in GOALS if goal.run == name]
    print("| case | measured | over | goal | |\n|---|---|---|---|---|")
    for row in rows:
        cells = show(row["measured"], ".2f"), row["peer"], f"{row['goal']:.2f}", row["verdict"]
        print(f"| {row['case']} | {' | '.join(cells)} |")
    if arguments.json:
        pathlib.Path(arguments.json).write_text(
            json.dumps({"goals": rows, "reports": reports}, indent=1)
        )


def settings(name: str, arguments: GoalsOptions) -> ReportOptions:
    """The arguments of `python -m bench` for this run."""
    words = [
        *RUNS[name].split(),
        "--rounds",
        str(arguments.rounds),
        "--new-tokens",
        str(arguments.new_tokens),
    ]
    if arguments.engines:
        words += ["--engines", *arguments.engines]
    if arguments.engine_python:
        words += ["--engine-python", arguments.engine_python]
    if arguments.quick:
        words += [*_QUICK.split(), "--limit-prompts", "2"]
    chosen = parse(BenchOptions, words, prog="python -m bench")
    check(chosen)
    one = {"batch": chosen.batch[0], "vocab_size": chosen.vocab_size[0], "prompt_length": None}
    return ReportOptions(**{**vars(chosen), **one})


def judge(goal: Goal, report: Report) -> Report:
    """A row of the table.

    A goal is met or missed if the whole interval is on one side of it, and open otherwise, or if a
    side of the ratio has no clean sample.
    """
    judged = goal.value(Rows(report))
    verdict = "open"
    if judged is not None:
        _, low, high = judged.value
        verdict = "met" if low >= goal.goal else "missed" if high < goal.goal else "open"
    return {
        "case": goal.case,
        "measured": judged and judged.value,
        "peer": judged.peer if judged else "",
        "goal": goal.goal,
        "verdict": verdict,
    }


if __name__ == "__main__":
    run(main)
