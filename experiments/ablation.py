"""specjax train ablation: train a draft per loss and kind of data, and compare their tau.

    specjax train ablation --target T --data FOLDERS --prompts held_out.jsonl \\
        --out runs/ablation -- --steps 500 ...

The options after `--` are passed to `train.distill` and are the same for every cell (a loss with a
kind of data).  The corpus is tokenised once, and the target writes its text once, at the
temperature of the loss.  Each cell is then trained in its own folder and measured on the prompts at
each temperature.  A finished cell is not trained again, and an interrupted one resumes.
`ablation.json` and `ablation.md` are written after every cell.  If `--initial` is among the options
after `--`, the initial model is measured too, as a row without training.

tau            tokens per pass of the target, with its 95 % interval over prompts
gain           relative gain in tau over forward KL on text, on the same prompts, with its interval
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Mapping
from typing import Any, TypedDict, cast

import numpy as np

from specjax.decoding import Decoder
from specjax.files import load, read_json
from specjax.generation import encode_file
from specjax.measure import interval, measure
from specjax.methods import DraftModel
from specjax.models import LanguageModel
from specjax.options.command import parse, run
from specjax.options.fields import REQUIRED, flag, inside, option
from specjax.parallel import leader, mesh_of
from specjax.rules import RULES
from specjax.training.corpus import TextOptions
from specjax.training.divergences import DIVERGENCES
from specjax.training.jobs import distill, generate
from specjax.training.jobs.distill import ACCEPTED_LENGTH, DistillOptions
from specjax.training.lock import alone
from specjax.training.mesh import MeshOptions, mesh_of_sizes, mesh_sizes, together
from specjax.training.record import read_metrics, versions, write
from specjax.training.shards import digest
from specjax.types import Params

MESH = tuple(field.name for field in dataclasses.fields(MeshOptions))
_SHARED = (
    "temperature",
    "num_drafts",
    "sequence_length",
    "anneal_steps",
    "sampled_prompt",
    "sampled_fraction",
)
"""Options of train.distill that are set for all cells."""

MODES: dict[str, tuple[str, ...]] = {
    "text": ("--sampled-fraction", "0"),
    "target": ("--sampled-fraction", "1"),
    "draft": ("--sampled-fraction", "0", "--draft-fraction", "1"),
    "mixture": ("--sampled-fraction", "0.5", "--draft-fraction", "0.25"),
    "online": ("--online",),
}
"""Kinds of data, as options of train.distill: fixed text, text of the target, text of the draft, a
mixture (a half by the target, a quarter by the draft, a quarter fixed text), and speculation."""

LOSSES = (*DIVERGENCES, ACCEPTED_LENGTH)
BASELINE = ("forward-kl", "text")
INITIAL = ("none", "--initial")

Counts = dict[str, list[int]]
"""The new tokens (`emitted`) and passes of the target (`passes`) of each prompt."""
Json = dict[str, Any]


class Measured(TypedDict, total=False):
    """The contents of `measured.json`, the result of one cell."""

    failure: str | None  # the message of a training that failed
    facts: dict[str, float]
    counts: dict[str, Counts]  # by temperature


@dataclasses.dataclass(frozen=True)
class AblationOptions(MeshOptions, TextOptions):
    """The options of the comparison and of its measurements."""

    group = "comparison"

    target: str = option(REQUIRED, "folder of the target")
    prompts: str = option(REQUIRED, 'held-out JSON lines, {"prompt": "..."}')
    out: str = option("runs/ablation", "folder of all cells and the report")
    losses: tuple[str, ...] = option(LOSSES, "training losses to compare", choices=LOSSES)
    modes: tuple[str, ...] = option(tuple(MODES), "kinds of data to compare", choices=tuple(MODES))
    temperatures: tuple[float, ...] = option((0.0, 1.0), "temperatures at which tau is measured")
    rule: str = option("match", "rule that accepts or rejects drafts", choices=sorted(RULES))
    num_drafts: int = option(4, "draft tokens per step, in training and when tau is measured")
    temperature: float = option(1.0, "temperature of the target's text and of the loss")
    anneal_steps: int | None = option(
        None, "steps over which a loss changes from forward KL; default: as in train.distill"
    )
    written_sequences: int = option(1024, "sequences that the target writes")
    written_prompt: int = option(32, "tokens of text that the target or the draft continues")
    written_batch: int = option(16, "sequences that the target writes at once")
    sequence_length: int = option(512, "tokens per sequence, in training")
    limit_prompts: int = option(0, "measure only on this many first prompts; 0: all")
    max_new_tokens: int = option(128, "new tokens per prompt")
    batch_size: int = option(8, "prompts measured at once")

    def __post_init__(self):
        super().__post_init__()
        inside(
            self, "[1, inf)", "num_drafts", "written_sequences", "written_prompt", "written_batch"
        )
        inside(self, "[1, inf)", "max_new_tokens", "batch_size", "sequence_length")
        inside(self, "[0, inf)", "temperature", "limit_prompts")
        inside(self, "[0, inf)", "anneal_steps")
        for heat in self.temperatures:
            if not 0 <= heat < math.inf:
                raise ValueError(f"--temperatures: {heat}; each must be finite and at least 0")
        if self.temperature == 0 and "reverse-kl" in self.losses:
            raise ValueError("--losses: reverse-kl is infinite at --temperature 0; leave it out")
        if self.written_prompt >= self.sequence_length:
            raise ValueError(
                f"--written-prompt is {self.written_prompt}; it must be shorter than a sequence"
            )


def cells(losses: tuple[str, ...], modes: tuple[str, ...]) -> list[tuple[str, str]]:
    """Returns the cells of a table, as (loss, kind of data), the baseline first.

    The accepted length is a mean over the target's text, so it is combined with no other data.
    """
    pairs = [(loss, mode) for loss in losses for mode in modes]
    valid = [cell for cell in pairs if cell[0] != ACCEPTED_LENGTH or cell[1] == "target"]
    return [BASELINE, *(cell for cell in valid if cell != BASELINE)]


def distillation(options: AblationOptions, cell: tuple[str, str], more: list[str]) -> list[str]:
    """Returns the options of `train.distill` for a cell, as a command line."""
    o, out, (loss, mode) = options, pathlib.Path(options.out), cell
    written = [str(out / "written")] if mode in ("target", "mixture") else []
    command = [
        *("--target", o.target, "--data", *o.data, *written, *_text(o)),
        *("--out", str(_folder(out, cell)), "--loss", loss, *MODES[mode]),
        *("--temperature", str(o.temperature)),
        *("--num-drafts", str(o.num_drafts), "--sampled-prompt", str(o.written_prompt)),
        *("--sequence-length", str(o.sequence_length)),
        *_mesh(o),
        *more,
    ]
    if o.anneal_steps is not None:
        command += ["--anneal-steps", str(o.anneal_steps if loss != BASELINE[0] else 0)]
    return command


def train(options: AblationOptions, cell: tuple[str, str], more: list[str]) -> str | None:
    """Trains a cell, or resumes it.

    Returns:
      The message of the error if its loss was not finite, else None.

    Raises:
      KeyboardInterrupt: the training was interrupted, and has saved a checkpoint.
    """
    folder = _folder(pathlib.Path(options.out), cell)
    folder.mkdir(parents=True, exist_ok=True)
    if leader() and not (folder / "corpus").exists():
        (folder / "corpus").symlink_to(pathlib.Path("..") / "written" / "corpus")
    try:
        distill.main(distillation(options, cell, more))
    except FloatingPointError as error:
        return str(error)
    if not (folder / "model").exists():
        raise KeyboardInterrupt  # the run was told to stop, and has saved a checkpoint
    return None


def _text(options: AblationOptions) -> list[str]:
    """Returns the options of the source of text, as a command line."""
    o = options
    more = ["--exclude", *o.exclude] if o.exclude else []
    more += [] if o.pattern is None else ["--pattern", o.pattern]
    more += [] if o.column is None else ["--column", o.column]
    return ["--max-bytes", str(o.max_bytes), *more]


def _mesh(options: AblationOptions) -> list[str]:
    """Returns the mesh as a command line, without processes, since they are connected already."""
    return [] if options.mesh is None else ["--mesh", options.mesh]


def tau(options: AblationOptions, target: LanguageModel, folder: pathlib.Path) -> dict[str, Counts]:
    """Returns the counts of each prompt with the draft in `folder`, by temperature."""
    o, measured = options, {}
    prompts = encode_file(target, pathlib.Path(o.prompts))
    prompts = prompts[: o.limit_prompts or len(prompts)]
    draft = load(folder, "float32", mesh=mesh_of(target.params))
    proposer = DraftModel(draft.model, target.model.vocab_size, o.num_drafts)
    room = max(map(len, prompts)) + o.max_new_tokens + o.num_drafts
    decoder = Decoder(target.model, proposer, RULES[o.rule](), target.eos, room)
    params, rows = Params(target.params, draft.params), min(o.batch_size, len(prompts))
    for temperature in o.temperatures:
        counts = measure(
            decoder,
            params,
            prompts,
            o.max_new_tokens,
            batch=rows,
            settings={"temperature": temperature},
            seed=0,
        ).counts
        measured[str(temperature)] = {
            "emitted": counts.emitted.tolist(),
            "passes": counts.passes.tolist(),
        }
    return measured


def gain(cell: Counts, baseline: Counts, seed: int = 0) -> tuple[float, float, float]:
    """Returns tau of a cell over the baseline's, minus 1, with its 95 % interval.

    The bootstrap is paired: each resample draws the same prompts for both.
    """
    columns = [
        np.array(counts[name]) for counts in (cell, baseline) for name in ("emitted", "passes")
    ]
    size = len(columns[0])
    drawn = np.random.default_rng(seed).integers(size, size=(2000, size))

    def ratio(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> np.ndarray:
        return (a / b) / (c / d) - 1

    low, high = np.quantile(ratio(*(column[drawn].sum(1) for column in columns)), [0.025, 0.975])
    return float(ratio(*(column.sum() for column in columns))), float(low), float(high)


def report(options: AblationOptions, found: Mapping[tuple[str, str], Measured]) -> Json:
    """Returns the results so far, and the cells that are left, as plain data."""
    rows, baseline = [], found.get(BASELINE, Measured()).get("counts", {})
    for (loss, mode), cell in found.items():
        facts = cell.get("facts", {})
        row: Json = {"loss": loss, "data": mode, "failure": cell.get("failure"), **facts}
        for temperature, counts in cell.get("counts", {}).items():
            row[f"tau_{temperature}"] = interval(
                np.array(counts["emitted"]), np.array(counts["passes"])
            )
            if temperature in baseline and (loss, mode) != BASELINE:
                row[f"gain_{temperature}"] = gain(counts, baseline[temperature])
        rows.append(row)
    wanted = cells(options.losses, options.modes)
    return {
        "options": dataclasses.asdict(options),
        "versions": versions(),
        "left": [".".join(cell) for cell in wanted if cell not in found],
        "rows": rows,
    }


def table(made: Json) -> str:
    """Returns the report as Markdown."""
    heats = made["options"]["temperatures"]
    names = [f"{name} at {t:g}" for t in heats for name in ("tau", "gain")]
    lines = [
        "| loss | data | " + " | ".join(names) + " | tokens/s of training |",
        "|" + "---|" * (3 + len(names)),
    ]
    for row in made["rows"]:
        parts = []
        for t in heats:
            value, more = row.get(f"tau_{t}"), row.get(f"gain_{t}")
            parts.append("" if value is None else "{:.3f} ({:.3f} to {:.3f})".format(*value))
            parts.append("" if more is None else "{:+.1%} ({:+.1%} to {:+.1%})".format(*more))
        if row["failure"]:
            parts = [row["failure"].split(",")[0], *[""] * (len(parts) - 1)]
        rate = row.get("tokens_per_second")
        speed = "" if rate is None else f"{rate:.0f}"
        lines.append(f"| {row['loss']} | {row['data']} | {' | '.join(parts)} | {speed} |")
    if made["left"]:
        lines += ["", f"not yet measured: {', '.join(made['left'])}"]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    cut = argv.index("--") if "--" in argv else len(argv)
    options = parse(AblationOptions, argv[:cut], __doc__)
    with alone(options.out):
        compare(options, argv[cut + 1 :])


def compare(options: AblationOptions, more: list[str]) -> None:
    """Runs the job in a folder that the caller holds; `more` are options of `train.distill`."""
    own = ("--out", "--loss", "--target", "--data", "--prompts", *map(flag, (*_SHARED, *MESH)))
    for name in (word.partition("=")[0] for word in more):
        if name in own:
            raise ValueError(f"{name} belongs before the --, since it is the same for all cells")
    o, out = options, pathlib.Path(options.out)
    # A mistake after the -- is reported now, and not after the target has generated its text.
    asked = parse(DistillOptions, distillation(o, BASELINE, more), distill.__doc__)
    if asked.lora is not None:
        raise ValueError(
            f"--lora {asked.lora}: an ablation measures --target as it is; merge the LoRA first, "
            "with specjax.save(specjax.load(target, lora=...), folder)"
        )
    initial = asked.initial
    out.mkdir(parents=True, exist_ok=True)
    _check_asked(options, more)
    generate.main(
        [
            *("--target", o.target, "--data", *o.data, *_text(o), "--out", str(out / "written")),
            *("--proposer", "ngram", "--temperature", str(o.temperature)),
            *("--sequences", str(o.written_sequences), "--prompt-tokens", str(o.written_prompt)),
            *("--max-new-tokens", str(o.sequence_length - o.written_prompt)),
            *("--batch-size", str(o.written_batch)),
            *_mesh(o),
        ]
    )
    sizes = mesh_sizes(o)
    target = load(o.target, "float32", mesh=mesh_of_sizes(sizes))
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
                print(f"stopped; the same command resumes {folder}", flush=True)
                return
            metrics = read_metrics(folder / "metrics.jsonl")
            rates = [row["tokens_per_second"] for row in metrics if "tokens_per_second" in row]
            facts = {"tokens_per_second": float(np.median(rates))} if rates else {}
            model = pathlib.Path(initial) if cell == INITIAL and initial else folder / "model"
            counts = {} if failure else tau(o, target, model)
            if leader():
                measured = Measured(failure=failure, facts=facts, counts=counts)
                write(result, json.dumps(measured) + "\n")
            together(f"measured {folder}")
        # The table also holds the cells of earlier calls.
        done = {cell: _folder(out, cell) / "measured.json" for cell in whole}
        made = report(
            o,
            {cell: cast(Measured, read_json(p)) for cell, p in done.items() if p.exists()},
        )
        if leader():
            write(out / "ablation.json", json.dumps(made, indent=1) + "\n")
            write(out / "ablation.md", table(made))
    print((out / "ablation.md").read_text(), flush=True)


def _check_asked(options: AblationOptions, more: list[str]) -> None:
    """Writes `asked.json`, or compares it with the options and the prompts of this call.

    Cells may be added later.  Any other change would make the cells incomparable.  Hashes of the
    target and of the text are in the dataset that the target writes.

    Raises:
      ValueError: an option, or the content of the file of prompts, has changed.
    """
    out, path = pathlib.Path(options.out), pathlib.Path(options.out) / "asked.json"
    inputs = {"prompts": digest(pathlib.Path(options.prompts))}
    asked = {"options": dataclasses.asdict(options), "distill": more, "inputs": inputs}
    asked = json.loads(json.dumps(asked))  # tuples become lists, as in the file
    before = read_json(path) if path.exists() else asked
    for name in sorted(set(asked["options"]) - {"losses", "modes", "out", *MESH}):
        was, is_now = before["options"].get(name), asked["options"][name]
        if was != is_now:
            raise ValueError(
                f"{out} was begun with {flag(name)} {was}, not {is_now}: choose another --out"
            )
    if before["distill"] != more:
        raise ValueError(
            f"{out} was begun with -- {' '.join(before['distill'])}: choose another --out"
        )
    if before.get("inputs") != asked["inputs"]:
        raise ValueError(
            f"the content of --prompts {options.prompts} has changed since {out} was begun: "
            "choose another --out"
        )
    if leader():
        write(path, json.dumps(asked, indent=1) + "\n")


def _folder(out: pathlib.Path, cell: tuple[str, str]) -> pathlib.Path:
    return out / ("initial" if cell == INITIAL else ".".join(cell))


if __name__ == "__main__":
    run(main)
