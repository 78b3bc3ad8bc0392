"""python -m train.aims NUMBER: what the trainer promises, measured over seeds of training.

    1  a draft whose target was fine-tuned on text of another kind: learning from its own text, or
       inside speculation, beside forward KL on fixed text with the same number of steps
    2  a pretrained student after a fifth of the steps, beside a fresh one after all of them
    3  training steps beside a compiled PyTorch loop in the same precision
    4  ten minutes of defaults for any target (--target, --data)

Every run is a folder of --out, and goes on where it stopped; a result that is there is not measured
again.  tau is measured with the decoder on held-out text.  Intervals (95 %) resample seeds and
prompts, the same ones for both sides of a ratio.  It runs from a checkout.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments import prose
from experiments.taus import ByHeat, counted, loaded, prompts_of, table
from specjax.files import load, read_json
from specjax.options.command import parse, run
from specjax.options.fields import REQUIRED, Options, inside, option
from specjax.training import DistillOptions, distillation
from specjax.training.jobs import distill, pretrain
from specjax.training.lock import alone
from specjax.training.record import read_run, write
from specjax.training.shards import check_request

_PAIR = pathlib.Path("checkpoints/pycode")
_SETTINGS = ("--sequence-length", "256", "--batch-size", "8", "--eval-batches", "4")


@dataclasses.dataclass(frozen=True)
class AimOptions(Options):
    """What is measured, and how long it trains."""

    aim: int = option(REQUIRED, "1, 2, 3 or 4")
    out: str = option("runs/aims", "folder of all runs")
    seeds: int = option(3, "training seeds")
    steps: int = option(0, "steps of a training; 0: the aim's own number")
    tune_steps: int = option(0, "steps that make the target of aim 1, and the student of aim 2")
    prompts: int = option(48, "held-out prompts")
    new_tokens: int = option(64, "new tokens of each prompt")
    losses: tuple[str, ...] = option(
        ("log-acceptance",), "losses that aim 1 combines with the draft's text and speculation"
    )
    prose: tuple[str, ...] = option((), "folders of the text of aim 1; default: documentation here")
    target: str = option("", "target of aim 4; default: checkpoints/tiny/target")
    data: tuple[str, ...] = option((), "its text; default: the code of specjax")
    minutes: float = option(10.0, "the most that a training of aim 4 may take")

    def __post_init__(self) -> None:
        super().__post_init__()
        inside(self, "[1, inf)", "seeds", "prompts", "new_tokens")
        inside(self, "[0, inf)", "steps", "tune_steps", "minutes")
        if self.aim not in AIMS:
            raise ValueError(f"--aim is {self.aim}; it must be one of {', '.join(map(str, AIMS))}")

    @property
    def folder(self) -> pathlib.Path:
        return pathlib.Path(self.out) / str(self.aim)


def trained(main: Callable[[list[str]], None], folder: pathlib.Path, *arguments: object) -> float:
    """Run a job to its end, or go on with it.

    Returns:
      Seconds of all calls so far.

    Raises:
      KeyboardInterrupt: the job was told to stop, and has saved a checkpoint.
    """
    clock = folder.with_suffix(".seconds")
    before = float(clock.read_text()) if clock.exists() else 0.0
    if (folder / "model").exists():
        return before
    began = time.perf_counter()
    main(["--out", str(folder), *map(str, arguments)])
    folder.parent.mkdir(parents=True, exist_ok=True)
    clock.write_text(str(before + time.perf_counter() - began))
    if not (folder / "model").exists():
        raise KeyboardInterrupt
    return float(clock.read_text())


def drift(options: AimOptions) -> str:
    """Aim 1: the draft of code for a target that was fine-tuned on prose."""
    o, out = options, options.folder
    texts = [str(prose.collect(out / "prose.jsonl"))] if not o.prose else list(o.prose)
    steps, tune = o.steps or 300, o.tune_steps or 1000
    data, target = ["--data", *texts], out / "target" / "model"
    trained(
        pretrain.main, out / "target", "--initial", _PAIR / "target", *data, "--steps", tune,
        "--learning-rate", "1e-3", "--warmup-steps", "50", "--decay-fraction", "0.5", *_SETTINGS,
    )  # fmt: skip
    whole = load(target, "float32")
    prompts = prompts_of(o, out / "target")
    rows = {
        "the old draft": [counted(o, out / "old.json", whole, loaded(_PAIR / "draft"), prompts)]
    }
    text, written = ("--sampled-fraction", "0"), ("--sampled-fraction", "1")
    arms: dict[str, tuple[object, ...]] = {
        "forward-kl, text": ("--loss", "forward-kl", *text),
        "forward-kl, old text": ("--loss", "forward-kl", *text, "--data", "specjax"),
        "forward-kl, target's text": ("--loss", "forward-kl", *written),
    }
    for loss in o.losses:
        named = ("--loss", loss)
        arms |= {
            f"{loss}, text": (*named, *text),
            f"{loss}, draft's text": (*named, *text, "--draft-fraction", "1"),
            f"{loss}, speculation": (*named, "--online"),
        }
    seconds: dict[str, str] = {}
    for name, arm in arms.items():
        rows[name], spent = [], []
        for seed in range(o.seeds):
            folder = out / name.replace(", ", ".").replace(" ", "-").replace("'", "") / str(seed)
            spent.append(trained(
                distill.main, folder, "--target", target, *data, "--initial", _PAIR / "draft",
                "--seed", seed, "--steps", steps, "--learning-rate", "1e-3", "--warmup-steps", "20",
                "--schedule", "cosine", "--sampled-sequences", "512", "--sampled-batch", "64",
                "--anneal-steps", "0", *_SETTINGS, *arm,
            ))  # fmt: skip
            model = loaded(folder / "model")
            rows[name].append(counted(o, folder / "tau.json", whole, model, prompts))
        seconds[name] = f"{np.mean(spent):.0f}"
        print(f"{name}: {seconds[name]} s a run", flush=True)
    bases = ("forward-kl, text", "forward-kl, old text")
    return table("draft", rows, bases, seconds)


def pretrained(options: AimOptions) -> str:
    """Aim 2: a student with the target's tokens that was trained on text before."""
    o, out, target = options, options.folder, _PAIR / "target"
    steps, tune = o.steps or 500, o.tune_steps or 1000
    data = ("--data", *(o.data or ("specjax", "tests", _library())), "--pattern", "*.py")
    sizes = ("--hidden-size", "128", "--mlp-size", "352", "--num-layers", "1", "--num-heads", "2",
             "--num-kv-heads", "1")  # fmt: skip
    rates = ("--learning-rate", "2e-3", "--warmup-steps", "20", "--schedule", "cosine")
    trained(
        pretrain.main, out / "student", "--tokenizer", target / "tokenizer.json", *data, *sizes,
        *rates, "--steps", tune, "--max-positions", "512", *_SETTINGS,
    )  # fmt: skip
    whole = load(target, "float32")
    prompts = prompts_of(o, out / "student")
    fifth = max(1, steps // 5)
    arms: dict[str, tuple[object, ...]] = {
        f"fresh, {steps} steps": (*sizes, "--steps", steps),
        f"fresh, {fifth} steps": (*sizes, "--steps", fifth),
        f"pretrained, {fifth} steps": ("--initial", out / "student" / "model", "--steps", fifth),
    }
    rows: dict[str, list[ByHeat]] = {
        "the pretrained student": [
            counted(o, out / "student.json", whole, loaded(out / "student" / "model"), prompts)
        ]
    }
    seconds = {}
    for name, arm in arms.items():
        rows[name], spent = [], []
        for seed in range(o.seeds):
            folder = out / name.replace(", ", "-").replace(" ", "-") / str(seed)
            spent.append(trained(
                distill.main, folder, "--target", target, *data, "--seed", seed, *rates,
                "--sampled-fraction", "0", *_SETTINGS, *arm,
            ))  # fmt: skip
            model = loaded(folder / "model")
            rows[name].append(counted(o, folder / "tau.json", whole, model, prompts))
        seconds[name] = f"{np.mean(spent):.0f}"
    return table("student", rows, (f"fresh, {steps} steps",), seconds)


def _library() -> str:
    import sysconfig

    return str(pathlib.Path(sysconfig.get_paths()["stdlib"]) / "asyncio")


def speed(options: AimOptions) -> str:
    """Aim 3: each seed is a process of its own, in which both libraries take turns."""
    o, out = options, options.folder
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in range(o.seeds):
        file = out / f"{seed}.json"
        if not file.exists():
            subprocess.run(
                [sys.executable, "-m", "train.bench", "--only", "distill", "medusa", "--compiled",
                 "--precisions", "bfloat16", "--rounds", str(o.steps or 5), "--out", str(file)],
                check=True,
            )  # fmt: skip
        speeds = json.loads(file.read_text())["speed"]
        for job in ("distill", "medusa"):
            rates = {
                one["library"]: one["tokens_per_second"] for one in speeds if one["job"] == job
            }
            if all(rates.values()):
                found.setdefault(job, []).append((rates["specjax"], rates["torch"]))
    names = (
        "job",
        "specjax, tokens/s",
        "compiled PyTorch",
        "ratio",
        "least",
        "greatest",
        "processes",
    )
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for job, pairs in found.items():
        ours, theirs = np.array(pairs).T
        each = ours / theirs
        lines.append(
            f"| {job} | {np.median(ours):.0f} | {np.median(theirs):.0f} | {np.median(each):.2f} "
            f"| {each.min():.2f} | {each.max():.2f} | {len(each)} |"
        )
    return "\n".join(lines)


def defaults(options: AimOptions) -> str:
    """Aim 4: a draft from folders alone, beside the same draft before it was trained."""
    o, out = options, options.folder
    target, data = o.target or "checkpoints/tiny/target", o.data or ("specjax",)
    whole = load(target, "float32")
    rows: dict[str, list[ByHeat]] = {"untrained": [], "trained": []}
    seconds = []
    for seed in range(o.seeds):
        folder = out / str(seed)
        command = [sys.executable, "-m", "train.distill", "--target", target, "--data", *data]
        command += ["--out", str(folder)] + ["--seed", str(seed)] * bool(seed)
        command += ["--steps", str(o.steps)] * bool(o.steps)
        clock = out / f"{seed}.seconds"
        if not (folder / "model").exists() and not clock.exists():
            began = time.perf_counter()
            process = subprocess.Popen(command)
            try:
                process.wait(60 * o.minutes)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)
                process.wait()
            clock.write_text(str(time.perf_counter() - began))
        seconds.append(float(clock.read_text()) if clock.exists() else 0.0)
        model = next((folder / n for n in ("model", "best") if (folder / n).exists()), None)
        if model is None:
            raise ValueError(
                f"{folder} has no model after {o.minutes} minutes: pass more --minutes"
            )
        asked = read_run(folder / "run.json", False) or {}
        names = {field.name for field in dataclasses.fields(DistillOptions)}
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in asked["options"].items()
            if name in names
        }
        job = distillation(DistillOptions(**given))
        prompts = prompts_of(o, job.material.held_out)
        pairs = {"untrained": lambda made=job: (made.draft, made.init()), "trained": loaded(model)}
        for name, draft in pairs.items():
            rows[name].append(counted(o, out / f"{seed}.{name}.json", whole, draft, prompts))
    more = {"trained": f"{np.mean(seconds):.0f}"}
    return table("draft", rows, ("untrained",), more)


def check_asked(options: AimOptions) -> None:
    """Raises ValueError if the folder was begun with other options; seeds may be added."""
    path = options.folder / "asked.json"
    own = {k: v for k, v in dataclasses.asdict(options).items() if k not in ("out", "seeds")}
    asked = json.loads(json.dumps(own))
    before = read_json(path) if path.exists() else asked
    check_request(options.folder, "measurement", before, asked)
    write(path, json.dumps(asked) + "\n")


AIMS = {1: drift, 2: pretrained, 3: speed, 4: defaults}


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0].isdigit():
        argv = ["--aim", *argv]
    options = parse(AimOptions, argv, __doc__)
    with alone(options.folder):
        check_asked(options)
        try:
            made = AIMS[options.aim](options)
        except KeyboardInterrupt:
            print(f"stopped; the same command goes on with {options.folder}", flush=True)
            return
    asked = json.dumps(dataclasses.asdict(options))
    write(options.folder / "table.md", f"{made}\n\n{asked}\n")
    print(made, flush=True)


if __name__ == "__main__":
    run(main)
