"""python -m bench.drafters: kinds of drafters, trained alike for one target, and then compared.

Every kind is trained on the same number of tokens, with several seeds, and drafts for the same
prompts: as a chain, and as trees of the best paths.  A run that was finished before is not trained
again, so an interrupted call goes on where it stopped.

Tokens per pass come with 95 % intervals over prompts, whose counts are summed over the seeds.
Seconds per step are those of decoding with one row, as medians over turns; `none` is plain
decoding.  Rows of other temperatures and rules follow each other in one table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import specjax
from bench.command import Report, run
from specjax.drafters import arrange
from specjax.generation import check_length, encode_file
from specjax.measure import (
    Sample,
    Timed,
    describe,
    first_calls,
    interval,
    medians,
    show,
    take_turns,
)
from specjax.methods import BoundDrafter, Drafter
from specjax.proposers import NoProposer
from specjax.training.measure import measure
from specjax.types import Params

JOBS: dict[str, tuple[str, ...]] = {
    "model": ("train.distill",),
    "medusa": ("train.medusa", "--soft"),
    "eagle3": ("train.drafter", "--kind", "eagle3"),
    "peagle": ("train.drafter", "--kind", "peagle"),
    "dflash": ("train.drafter", "--kind", "dflash"),
    "dspark": ("train.drafter", "--kind", "dspark"),
}
"""Kind -> the job that trains it, and the options that it needs."""

_TREES = (8, 16, 32)
_WIDTH = 8


@dataclasses.dataclass(frozen=True)
class Form:
    """One arrangement of the drafts of a kind: a chain, or a tree of so many nodes."""

    kind: str
    num_nodes: int | None = None

    def __str__(self) -> str:
        return f"{self.kind}, " + ("chain" if self.num_nodes is None else f"{self.num_nodes} nodes")


class _Entry(Timed):
    """Decoding with one row, on each prompt."""

    def __init__(
        self, form: Form | None, target: specjax.LanguageModel, prompts: list[list[int]],
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__("plain decoding" if form is None else str(form), len(prompts))
        self.form, self.steps = form, np.zeros(len(prompts))
        self._target, self._prompts, self._options = target, prompts, options

    def run(self, item: int) -> Sample:
        output = specjax.generate(self._target, [self._prompts[item]], **self._options)
        self.steps[item] = output.stats.target_passes
        return Sample(output.stats.seconds, output.stats.compile_seconds)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.drafters", description=__doc__)
    parser.add_argument("--target", required=True, help="folder of the target")
    parser.add_argument("--data", nargs="+", required=True, help="as for the training jobs")
    parser.add_argument("--pattern", default="*.py", help="as for the training jobs")
    parser.add_argument("--exclude", nargs="+", default=[], help="as for the training jobs")
    parser.add_argument("--prompts", required=True, help="held-out prompts, as JSON lines")
    parser.add_argument("--limit-prompts", type=int, default=0, help="use only so many; 0: all")
    parser.add_argument("--kinds", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=2000, help="training steps of each run")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences of a step")
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--num-drafts", type=int, default=7, help="depth of the trained drafts")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument(
        "--temperatures", nargs="*", type=float, default=[0.0, 1.0],
        help="of the counts; none leaves them out",
    )  # fmt: skip
    parser.add_argument("--rules", nargs="+", default=["match", "rejection"])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=0, help="timed turns; 0: no speed")
    parser.add_argument("--out", default="runs/drafters", help="folder of all runs")
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args(argv)
    out = pathlib.Path(arguments.out)
    for kind in arguments.kinds:
        for seed in range(arguments.seeds):
            train(kind, seed, out / f"{kind}-{seed}", arguments)
    target = specjax.load(arguments.target, "float32")
    prompts = encode_file(target, pathlib.Path(arguments.prompts))
    prompts = prompts[: arguments.limit_prompts or len(prompts)]
    for kind in arguments.kinds:
        for _, drafter in drafters(kind, out / f"{kind}-0", target, arguments.num_drafts):
            if drafter.reader is not None:  # before hours of counting
                check_length("draft", drafter.reader, prompts, arguments.max_new_tokens)
    rows = [
        row
        for temperature in arguments.temperatures
        for rule in arguments.rules
        for row in accepted(arguments, out, target, prompts, rule, temperature)
    ]
    report: Report = {**describe(), "options": vars(arguments), "prompts": len(prompts)}
    report["rows"] = rows
    if arguments.rounds:
        report["steps"] = timed(arguments, out, target, prompts)
    print(table(report))
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")


def train(kind: str, seed: int, folder: pathlib.Path, arguments: argparse.Namespace) -> None:
    """Train one drafter in a process of its own, unless it was finished before."""
    if (folder / "model").exists():
        return
    module, *options = JOBS[kind]
    a = arguments
    numbers = {
        "steps": a.steps,
        "batch-size": a.batch_size,
        "sequence-length": a.sequence_length,
        "learning-rate": a.learning_rate,
        "warmup-steps": min(100, a.steps // 5),
        "decay-fraction": 0.35,
        "eval-every": a.steps,
        "eval-batches": 2,
        "seed": seed,
        "num-heads" if kind == "medusa" else "num-drafts": a.num_drafts,
    }
    if kind == "model":
        numbers["sampled-fraction"] = 0.0
    data = ["--pattern", a.pattern, "--data", *a.data]
    data += ["--exclude", *a.exclude] if a.exclude else []
    print(f"training {kind}, seed {seed}", flush=True)
    subprocess.run(
        [sys.executable, "-m", module, *options, "--target", a.target, *data, "--out", str(folder)]
        + [part for name, value in numbers.items() for part in (f"--{name}", str(value))],
        check=True,
    )


def drafters(
    kind: str, folder: pathlib.Path, target: specjax.LanguageModel, num_drafts: int
) -> Iterator[tuple[Form, Drafter]]:
    """The drafter of a run as a chain, and as trees."""
    if kind == "model":
        draft = specjax.load(folder / "model", "float32")
        yield Form(kind), specjax.make_drafter(target, draft, num_drafts=num_drafts)
        for nodes in _TREES:
            shape: dict[str, Any] = {"depth": num_drafts, "width": _WIDTH, "num_nodes": nodes}
            made = specjax.make_drafter(target, draft, specjax.DynamicTree, **shape)
            yield Form(kind, nodes), made
        return
    loaded = specjax.load_drafter(folder / "model", target)
    yield Form(kind), arrange(loaded, num_drafts)
    for nodes in _TREES:
        yield Form(kind, nodes), arrange(loaded, num_drafts, nodes, _WIDTH)


def accepted(
    arguments: argparse.Namespace,
    out: pathlib.Path,
    target: specjax.LanguageModel,
    prompts: list[list[int]],
    rule: str,
    temperature: float,
) -> Iterator[Report]:
    """Tokens per pass of every form under a rule, over all seeds."""
    a, made = arguments, specjax.RULES[rule]()
    room = max(map(len, prompts)) + a.max_new_tokens
    for kind in a.kinds:
        print(f"counting {kind}, {rule}, temperature {temperature:g}", flush=True)
        found: dict[Form, list[Any]] = {}
        for seed in range(a.seeds):
            for form, drafter in drafters(kind, out / f"{kind}-{seed}", target, a.num_drafts):
                proposer = drafter.proposer
                capacity = max(room, proposer.num_nodes)
                decoder = specjax.Decoder(target.model, proposer, made, target.eos, capacity)
                rows = min(len(prompts), 13)
                params = Params(target.params, drafter.arrays(target, rows))
                settings = {"temperature": temperature}
                measured = measure(
                    decoder, params, prompts, a.max_new_tokens,
                    batch=rows, settings=settings, seed=seed,
                )  # fmt: skip
                found.setdefault(form, []).append(measured.counts)
        for form, counts in found.items():
            emitted, passes = (
                np.sum([vars(c)[name] for c in counts], axis=0) for name in ("emitted", "passes")
            )
            by_seed = [float(c.emitted.sum() / c.passes.sum()) for c in counts]
            yield {
                "kind": form.kind,
                "num_nodes": form.num_nodes,
                "rule": rule,
                "temperature": temperature,
                "tokens_per_pass": interval(emitted, passes),
                "by_seed": by_seed,
            }


def timed(
    arguments: argparse.Namespace,
    out: pathlib.Path,
    target: specjax.LanguageModel,
    prompts: list[list[int]],
) -> list[Report]:
    """Seconds of a step and tokens/s of the first seed's drafters, greedy, in turn."""
    options = {"max_new_tokens": arguments.max_new_tokens, "temperature": 0.0}
    plain = {**options, "drafter": BoundDrafter(NoProposer())}
    entries = [_Entry(None, target, prompts, plain)]
    for kind in arguments.kinds:
        for form, drafter in drafters(kind, out / f"{kind}-0", target, arguments.num_drafts):
            entries.append(_Entry(form, target, prompts, {**options, "drafter": drafter}))
    entries, _ = first_calls(entries)
    take_turns(entries, arguments.rounds)
    rows: list[Report] = []
    for entry in entries:
        if not all(entry.seconds):
            print(f"{entry.name}: other processes disturbed every sample of a prompt", flush=True)
            continue
        seconds, steps = np.asarray(medians(entry.seconds)), entry.steps
        form = entry.form
        rows.append(
            {
                "kind": "none" if form is None else form.kind,
                "num_nodes": None if form is None else form.num_nodes,
                "milliseconds_per_step": interval(1e3 * seconds, steps),
                "seconds": float(seconds.sum()),
            }
        )
    return rows


def table(report: Report) -> str:
    """The figures as Markdown."""
    lines = []
    if report["rows"]:
        lines.append("| drafter | drafts | rule | temperature | tokens per pass | by seed |")
        lines.append("|---|---|---|---|---|---|")
    for row in report["rows"]:
        seeds = " ".join(f"{value:.2f}" for value in row["by_seed"])
        lines.append(
            f"| {row['kind']} | {_drafts(row)} | {row['rule']} | {row['temperature']:g} "
            f"| {show(row['tokens_per_pass'], '.2f')} | {seeds} |"
        )
    if "steps" in report:
        lines += ["", "| drafter | drafts | ms a step | seconds in all |", "|---|---|---|---|"]
        for row in report["steps"]:
            each = show(row["milliseconds_per_step"], ".2f")
            lines.append(f"| {row['kind']} | {_drafts(row)} | {each} | {row['seconds']:.2f} |")
    return "\n".join(lines)


def _drafts(row: Report) -> str:
    if row["kind"] == "none":
        return ""
    return "chain" if row["num_nodes"] is None else f"tree of {row['num_nodes']} nodes"


if __name__ == "__main__":
    run(main)
