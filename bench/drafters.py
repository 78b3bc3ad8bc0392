"""python -m bench.drafters: kinds of drafters, trained alike for one target, and then compared.

Every kind is trained on the same number of tokens, with several seeds, and drafts for the same
prompts: as a chain, and as trees of the best paths.  A run that was finished before is not trained
again, so an interrupted call goes on where it stopped.

Tokens per pass come with 95 % intervals over prompts, whose counts are summed over the seeds.
Seconds per step are those of decoding with one row, as medians over turns; `none` is plain
decoding.  Rows of other temperatures and rules follow each other in one table.
"""

from __future__ import annotations

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
    measure,
    medians,
    show,
    take_turns,
)
from specjax.methods import BoundDrafter, Drafter
from specjax.options import fields
from specjax.options.command import parse
from specjax.proposers import NoProposer
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


@dataclasses.dataclass(frozen=True)
class DraftersOptions(fields.Options):
    """The options of `python -m bench.drafters`."""

    target: str = fields.option(fields.REQUIRED, "folder of the target")
    data: tuple[str, ...] = fields.option(fields.REQUIRED, "as for the training jobs")
    pattern: str = fields.option("*.py", "as for the training jobs")
    exclude: tuple[str, ...] = fields.option((), "as for the training jobs")
    prompts: str = fields.option(fields.REQUIRED, "held-out prompts, as JSON lines")
    limit_prompts: int = fields.option(0, "use only so many; 0: all")
    kinds: tuple[str, ...] = fields.option(tuple(JOBS), "kinds of drafters", choices=list(JOBS))
    seeds: int = fields.option(3, "runs of each kind")
    steps: int = fields.option(2000, "training steps of each run")
    batch_size: int = fields.option(4, "sequences of a step")
    sequence_length: int = fields.option(256, "tokens per sequence")
    num_drafts: int = fields.option(7, "depth of the trained drafts")
    learning_rate: float = fields.option(2e-3, "peak learning rate")
    temperatures: tuple[float, ...] = fields.option(
        (0.0, 1.0), "of the counts; none leaves them out"
    )
    rules: tuple[str, ...] = fields.option(("match", "rejection"), "rules of the counts")
    max_new_tokens: int = fields.option(128, "limit per text, in tokens")
    rounds: int = fields.option(0, "timed turns; 0: no speed")
    out: str = fields.option("runs/drafters", "folder of all runs")
    json: str | None = fields.option(None, "write the figures to this file")


def main(argv: list[str] | None = None) -> None:
    arguments = parse(DraftersOptions, argv, __doc__, "python -m bench.drafters")
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


def train(kind: str, seed: int, folder: pathlib.Path, arguments: DraftersOptions) -> None:
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
    arguments: DraftersOptions,
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
    arguments: DraftersOptions,
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
