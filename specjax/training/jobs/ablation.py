"""python -m train.ablation: a draft for each loss and each kind of data, with the same budget, by measured tau.

    python -m train.ablation --target T --data FOLDERS --prompts held_out.jsonl --out runs/ablation -- --steps 500 ...

What stands behind `--` goes to `train.distill` as it is, the same for every cell.  Tokens of the corpus and the text
that the target writes (at the temperature that the loss is taken at) are made once.  Then a cell at a time is trained
in its own folder and measured on the prompts at each temperature; a cell that is there is not made again, one that was
interrupted goes on.  `ablation.json` and `ablation.md` hold what there is after every cell.  With `--initial` behind
`--` the model that all cells go on from is measured too: a row of its own, before any training.

tau            tokens per pass of the target, and its 95 % interval over prompts
gain           tau over that of forward KL on fixed text, minus 1, on the same prompts, with its interval
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import sys
from typing import Any

import numpy as np

from specjax.decoding import Decoder
from specjax.files import load
from specjax.models import LanguageModel
from specjax.parallel import leader, make_mesh, mesh_of
from specjax.proposers import DraftModel
from specjax.rules import RULES
from specjax.training.corpus import TextOptions
from specjax.training.divergences import DIVERGENCES
from specjax.training.jobs import distill, generate
from specjax.training.jobs.distill import ACCEPTED_LENGTH
from specjax.training.measure import interval, measure
from specjax.training.mesh import MeshOptions, mesh_sizes, together
from specjax.training.options import REQUIRED, at_least, flag, option, parse, run
from specjax.training.record import read_metrics, versions, write
from specjax.training.speculation import read_prompts
from specjax.types import Params

MESH = tuple(field.name for field in dataclasses.fields(MeshOptions))

MODES: dict[str, tuple[str, ...]] = {
    "text": ("--sampled-fraction", "0"),
    "target": ("--sampled-fraction", "1"),
    "draft": ("--sampled-fraction", "0", "--draft-fraction", "1"),
    "mixture": ("--sampled-fraction", "0.5", "--draft-fraction", "0.25"),
    "online": ("--online",),
}
"""Kinds of data, as options of train.distill: fixed text, written by the target, by the draft, a quarter text and a
quarter the draft's beside half of the target's, and inside speculation."""

LOSSES = (*DIVERGENCES, ACCEPTED_LENGTH)
BASELINE = ("forward-kl", "text")
INITIAL = ("none", "--initial")


@dataclasses.dataclass(frozen=True)
class AblationOptions(MeshOptions, TextOptions):
    """What is compared, and how it is measured."""

    target: str = option(REQUIRED, "folder of the target")
    prompts: str = option(REQUIRED, 'held-out JSON lines, {"prompt": "..."}')
    out: str = option("runs/ablation", "folder of it all")
    losses: tuple[str, ...] = option(LOSSES, "rows", choices=LOSSES)
    modes: tuple[str, ...] = option(tuple(MODES), "columns", choices=tuple(MODES))
    temperatures: tuple[float, ...] = option((0.0, 1.0), "at which tau is measured")
    rule: str = option("match", "by which guesses are kept", choices=sorted(RULES))
    num_drafts: int = option(4, "guesses a step, in training and in measuring")
    temperature: float = option(1.0, "at which the target writes, and the loss is taken")
    anneal_steps: int | None = option(
        None, "steps in which a loss goes over from forward KL; by default as train.distill has it"
    )
    written_sequences: int = option(1024, "that the target writes")
    written_prompt: int = option(32, "tokens of text that it, or the draft, goes on from")
    written_batch: int = option(16, "that it writes at once")
    sequence_length: int = option(512, "tokens a sequence, in training")
    limit_prompts: int = option(0, "measure on the first so many prompts only; 0: all")
    max_new_tokens: int = option(128, "for each of them")
    batch_size: int = option(8, "prompts measured at once")

    def __post_init__(self):
        super().__post_init__()
        at_least(
            self,
            1,
            "num_drafts",
            "written_sequences",
            "written_prompt",
            "written_batch",
            "max_new_tokens",
        )
        at_least(self, 1, "batch_size", "sequence_length")
        at_least(self, 0, "temperature", "limit_prompts")
        if self.anneal_steps is not None:
            at_least(self, 0, "anneal_steps")
        for heat in self.temperatures:
            if not 0 <= heat < math.inf:
                raise ValueError(f"--temperatures: {heat}; each must be at least 0, and finite")
        if self.temperature == 0 and "reverse-kl" in self.losses:
            raise ValueError("--losses: reverse-kl is infinite at --temperature 0; leave it out")
        if self.written_prompt >= self.sequence_length:
            raise ValueError(
                f"--written-prompt is {self.written_prompt}; it must be shorter than a sequence"
            )


def cells(losses: tuple[str, ...], modes: tuple[str, ...]) -> list[tuple[str, str]]:
    """Loss and kind of data; the baseline first.  The accepted length is a mean over the target's text alone."""
    found = [(loss, mode) for loss in losses for mode in modes]
    kept = [cell for cell in found if cell[0] != ACCEPTED_LENGTH or cell[1] == "target"]
    return [BASELINE, *(cell for cell in kept if cell != BASELINE)]


def train(options: AblationOptions, cell: tuple[str, str], more: list[str]) -> str | None:
    """Train a cell, or go on with it.  What went wrong with its numbers, if anything did."""
    o, out = options, pathlib.Path(options.out)
    (loss, mode), folder = cell, _folder(out, cell)
    folder.mkdir(parents=True, exist_ok=True)
    if leader() and not (folder / "corpus").exists():
        (folder / "corpus").symlink_to(pathlib.Path("..") / "written" / "corpus")
    needs_written = mode in ("target", "mixture")
    command = [
        *(
            "--target",
            o.target,
            "--data",
            *o.data,
            *([str(out / "written")] * needs_written),
            *_text(o),
        ),
        *("--out", str(folder), "--loss", loss, *MODES[mode], "--temperature", str(o.temperature)),
        *("--num-drafts", str(o.num_drafts), "--sampled-prompt", str(o.written_prompt)),
        *("--sequence-length", str(o.sequence_length)),
        *_mesh(o),
        *more,
    ]
    if o.anneal_steps is not None:
        command += ["--anneal-steps", str(o.anneal_steps if loss != BASELINE[0] else 0)]
    try:
        distill.main(command)
    except FloatingPointError as error:
        return str(error)
    if not (folder / "model").exists():
        raise KeyboardInterrupt  # it was asked to stop, and has saved
    return None


def _text(options: AblationOptions) -> list[str]:
    """Options of the source of text, as they were given."""
    o = options
    exclude = ["--exclude", *o.exclude] if o.exclude else []
    return ["--pattern", o.pattern, "--max-bytes", str(o.max_bytes), *exclude]


def _mesh(options: AblationOptions) -> list[str]:
    """For jobs of processes that have found each other already."""
    return [] if options.mesh is None else ["--mesh", options.mesh]


def tau(
    options: AblationOptions, target: LanguageModel, folder: pathlib.Path
) -> dict[str, dict[str, list[int]]]:
    """By temperature: new tokens and passes of the target, for each prompt."""
    o, found = options, {}
    prompts = read_prompts(target, o.prompts)
    prompts = prompts[: o.limit_prompts or len(prompts)]
    draft = load(folder, mesh=mesh_of(target.params))
    proposer = DraftModel(draft.model, target.model.vocab_size, o.num_drafts)
    room = max(map(len, prompts)) + o.max_new_tokens + o.num_drafts
    decoder = Decoder(target.model, proposer, RULES[o.rule](), target.eos, room)
    for temperature in o.temperatures:
        counts = measure(
            decoder, Params(target.params, draft.params), prompts, o.max_new_tokens,
            batch=min(o.batch_size, len(prompts)), settings={"temperature": temperature}, seed=0,
        ).counts  # fmt: skip
        found[str(temperature)] = {
            "emitted": counts.emitted.tolist(),
            "passes": counts.passes.tolist(),
        }
    return found


def gain(
    cell: dict[str, list[int]], baseline: dict[str, list[int]], seed: int = 0
) -> tuple[float, float, float]:
    """tau of a cell over the baseline's, minus 1, and its 95 % interval: a bootstrap that draws prompts for both."""
    columns = [
        np.array(counts[name]) for counts in (cell, baseline) for name in ("emitted", "passes")
    ]
    size = len(columns[0])
    drawn = np.random.default_rng(seed).integers(size, size=(2000, size))

    def ratio(a, b, c, d):
        return (a / b) / (c / d) - 1

    low, high = np.quantile(ratio(*(column[drawn].sum(1) for column in columns)), [0.025, 0.975])
    return float(ratio(*(column.sum() for column in columns))), float(low), float(high)


def report(
    options: AblationOptions, found: dict[tuple[str, str], dict[str, Any]]
) -> dict[str, Any]:
    """What there is so far, as plain data."""
    rows, baseline = [], found.get(BASELINE, {}).get("counts", {})
    for (loss, mode), cell in found.items():
        row: dict[str, Any] = {
            "loss": loss,
            "data": mode,
            "failure": cell.get("failure"),
            **cell.get("facts", {}),
        }
        for temperature, counts in cell.get("counts", {}).items():
            row[f"tau_{temperature}"] = interval(
                np.array(counts["emitted"]), np.array(counts["passes"])
            )
            if temperature in baseline and (loss, mode) != BASELINE:
                row[f"gain_{temperature}"] = gain(counts, baseline[temperature])
        rows.append(row)
    left = [".".join(cell) for cell in cells(options.losses, options.modes) if cell not in found]
    return {
        "options": dataclasses.asdict(options),
        "versions": versions(),
        "left": left,
        "rows": rows,
    }


def table(made: dict[str, Any]) -> str:
    """The report as Markdown."""
    heats = made["options"]["temperatures"]
    names = [f"{name} at {t:g}" for t in heats for name in ("tau", "gain")]
    lines = [
        "| loss | data | " + " | ".join(names) + " | tokens/s of training |",
        "|" + "---|" * (3 + len(names)),
    ]
    for row in made["rows"]:
        parts = []
        for t in heats:
            found, more = row.get(f"tau_{t}"), row.get(f"gain_{t}")
            parts.append("" if found is None else "{:.3f} ({:.3f} to {:.3f})".format(*found))
            parts.append("" if more is None else "{:+.1%} ({:+.1%} to {:+.1%})".format(*more))
        if row["failure"]:
            parts = [row["failure"].split(",")[0], *[""] * (len(parts) - 1)]
        rate = row.get("tokens_per_second")
        lines.append(
            f"| {row['loss']} | {row['data']} | {' | '.join(parts)} | {'' if rate is None else f'{rate:.0f}'} |"
        )
    if made["left"]:
        lines += ["", f"still to come: {', '.join(made['left'])}"]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    cut = argv.index("--") if "--" in argv else len(argv)
    options, more = parse(AblationOptions, argv[:cut], __doc__), argv[cut + 1 :]
    for taken in (
        "--out",
        "--loss",
        "--target",
        "--data",
        "--prompts",
        *map(flag, (*_shared(), *MESH)),
    ):
        if taken in more:
            raise ValueError(f"{taken} belongs before the --, since it is the same for all cells")
    o, out = options, pathlib.Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    asked = {"options": dataclasses.asdict(options), "distill": more}
    asked = json.loads(json.dumps(asked))
    # Rows and columns may be added; all else would make cells that cannot be compared.
    fixed = out / "asked.json"
    before = json.loads(fixed.read_text()) if fixed.exists() else asked
    for name in sorted(set(asked["options"]) - {"losses", "modes", "out", *MESH}):
        if before["options"].get(name) != asked["options"][name]:
            was, is_now = before["options"].get(name), asked["options"][name]
            raise ValueError(
                f"{out} was begun with {flag(name)} {was}, not {is_now}: choose another --out"
            )
    if before["distill"] != more:
        raise ValueError(
            f"{out} was begun with -- {' '.join(before['distill'])}: choose another --out"
        )
    if leader():
        write(fixed, json.dumps(asked, indent=1) + "\n")
    generate.main([
        *("--target", o.target, "--data", *o.data, *_text(o), "--out", str(out / "written"), "--proposer", "ngram"),
        *("--temperature", str(o.temperature), "--sequences", str(o.written_sequences)),
        *("--prompt-tokens", str(o.written_prompt), "--max-new-tokens"),
        str(o.sequence_length - o.written_prompt),
        *("--batch-size", str(o.written_batch)), *_mesh(o),
    ])  # fmt: skip
    sizes = mesh_sizes(o)
    target = load(o.target, mesh=None if sizes is None else make_mesh(**sizes))
    initial = more[more.index("--initial") + 1] if "--initial" in more else None
    whole = [*([INITIAL] if initial else []), *cells(LOSSES, tuple(MODES))]
    for cell in (cell for cell in whole if cell == INITIAL or cell in cells(o.losses, o.modes)):
        folder = _folder(out, cell)
        result = folder / "measured.json"
        if not result.exists():
            print(f"\n{' on '.join(cell)}", flush=True)
            folder.mkdir(parents=True, exist_ok=True)
            try:
                failure = None if cell == INITIAL else train(o, cell, more)
            except KeyboardInterrupt:
                print(f"stopped; the same command goes on with {folder}", flush=True)
                return
            rates = [line["tokens_per_second"] for line in read_metrics(folder / "metrics.jsonl")
                     if "tokens_per_second" in line]  # fmt: skip
            facts = {"tokens_per_second": float(np.median(rates))} if rates else {}
            model = pathlib.Path(initial) if cell == INITIAL and initial else folder / "model"
            counts = {} if failure else tau(o, target, model)
            if leader():
                write(
                    result,
                    json.dumps({"failure": failure, "facts": facts, "counts": counts}) + "\n",
                )
            together(f"measured {folder}")
        # What an earlier call made stays in the table.
        done = {cell: _folder(out, cell) / "measured.json" for cell in whole}
        made = report(
            o, {cell: json.loads(path.read_text()) for cell, path in done.items() if path.exists()}
        )
        if leader():
            write(out / "ablation.json", json.dumps(made, indent=1) + "\n")
            write(out / "ablation.md", table(made))
    print((out / "ablation.md").read_text(), flush=True)


def _folder(out: pathlib.Path, cell: tuple[str, str]) -> pathlib.Path:
    return out / ("initial" if cell == INITIAL else ".".join(cell))


def _shared() -> tuple[str, ...]:
    return (
        "temperature",
        "num_drafts",
        "sequence_length",
        "anneal_steps",
        "sampled_prompt",
        "sampled_fraction",
    )


if __name__ == "__main__":
    run(main)
