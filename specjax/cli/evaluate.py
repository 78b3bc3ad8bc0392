"""`specjax evaluate` scores the texts of checkpoint after checkpoint, with paired intervals."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import specjax
from specjax import plot
from specjax.generation import conversations, encode, read_records
from specjax.measure import describe, show
from specjax.options.command import parse
from specjax.options.exits import say
from specjax.options.fields import REQUIRED, Options, count, option
from specjax.options.models import DeviceOptions, meshes
from specjax.options.sampling import SamplingOptions
from specjax.options.waiting import progress
from specjax.rollouts import (
    Checkpoint,
    Evaluation,
    Sampler,
    Score,
    compare_scores,
    find_checkpoints,
)


@dataclasses.dataclass(frozen=True)
class CheckpointOptions(Options):
    """The checkpoints of a model."""

    group = "model"

    checkpoints: tuple[str, ...] = option(
        (),
        "folders of models or of Orbax, from the first to the last one; of the folder of a run, "
        "the kept steps are taken",
        positional=True,
    )
    target: str | None = option(
        None,
        "folder of the model's configuration and tokenizer; default: the first checkpoint, or the "
        "`model` in the folder of a run",
    )
    dtype: str | None = option(None, "float32, bfloat16 or float16; default: as for generate")
    mesh: str | None = option(
        None, "split each layer over M devices; default: one device", metavar="model=M"
    )


@dataclasses.dataclass(frozen=True)
class EvaluateOptions(CheckpointOptions, SamplingOptions):
    """The options of `specjax evaluate`."""

    group = "evaluation"

    prompt_file: str = option(
        REQUIRED, "a text file (one prompt), or JSON lines with a field `prompt` or `messages`"
    )
    score: str = option(
        REQUIRED,
        "your function (prompt, text), which returns a number; it also gets the fields of a line "
        "of --prompt-file that it has parameters for",
        metavar="MODULE:FUNCTION",
    )
    samples: int = count(4, "texts of each prompt")
    temperature: float | None = option(1.0, "0 is greedy")
    seed: int = option(0, "random seed; checkpoints share the noise of each text")
    slots: int = count(8, "texts that are decoded at once")
    num_drafts: int = count(
        16, "the most tokens of the previous checkpoint's text that a pass reads", 0
    )
    out: str | None = option(
        None, "keep texts and report in this folder; the same command goes on with it"
    )
    json: bool = option(False, "print one JSON object and nothing else")
    plot: str | None = option(None, "draw the scores to this file", metavar="FILE")


def main(prog: str, argv: list[str]) -> None:
    arguments = parse(EvaluateOptions, argv, prog=prog)
    if arguments.plot:
        plot.new_figure()  # without matplotlib this raises before the evaluation, not after it
    score = Score(arguments.score)
    records = read_records(pathlib.Path(arguments.prompt_file))
    score.check([fields for _, fields in records])
    checkpoints = find_checkpoints(arguments.checkpoints)
    target = _target(arguments, checkpoints)
    for checkpoint in checkpoints:
        checkpoint.check(target)
    prompts = [_ids(target, index, prompt) for index, (prompt, _) in enumerate(records)]
    settings: dict[str, Any] = {**arguments.sampled(target, arguments.temperature)}
    seed = settings.pop("seed")
    if settings["temperature"] == 0 and arguments.samples > 1:
        raise ValueError(
            f"--samples {arguments.samples} at temperature 0 are the same text: pass --samples 1, "
            "or a --temperature above 0"
        )
    sampler = Sampler(target, slots=arguments.slots, num_drafts=arguments.num_drafts, **settings)
    out = None if arguments.out is None else pathlib.Path(arguments.out)
    evaluation = Evaluation(sampler, prompts, arguments.samples, seed=seed, folder=out)
    rows, scores = [], []
    for checkpoint in checkpoints:
        row, own = _evaluated(evaluation, checkpoint, records, score)
        rows.append(row)
        scores.append(own)
    compared = compare_scores(np.array(scores))
    report = {
        **describe(),
        "score": arguments.score,
        "prompts": len(prompts),
        "samples": arguments.samples,
        "seed": seed,
        "dtype": target.model.dtype.name,
        **sampler.settings,
        "checkpoints": [
            {**row, **figures, "scores": own}
            for row, figures, own in zip(rows, compared, scores, strict=True)
        ],
    }
    if out is not None:
        (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    if arguments.plot:
        plot.evaluation(report).savefig(arguments.plot)
    if arguments.json:
        print(json.dumps(report))
    else:
        _print_table(report)


def _target(arguments: EvaluateOptions, checkpoints: Sequence[Checkpoint]) -> specjax.LanguageModel:
    """Returns the model whose weights are those of the first checkpoint, or of `--target`."""
    folder: Any = arguments.target
    if folder is None:
        models = [each.path for each in checkpoints if not each.orbax]
        runs = [pathlib.Path(each) / "model" for each in arguments.checkpoints]
        folder = next(iter([*models, *(run for run in runs if run.is_dir())]), None)
    if folder is None:
        raise ValueError(
            f"{checkpoints[0].path} has weights alone: pass --target with the folder of the "
            "model's configuration and tokenizer"
        )
    mesh, _ = meshes(DeviceOptions.sizes("mesh", arguments.mesh), None)
    with progress("loading"):
        target = specjax.load(folder, arguments.dtype, mesh=mesh)
    if target.tokenizer is None:
        raise ValueError(
            f"{target.name} has no tokenizer.json, and --score reads text: put one beside "
            "config.json, or pass --target with a folder that has one"
        )
    return target


def _ids(target: specjax.LanguageModel, index: int, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError(f"prompt {index} is empty; a prompt needs at least one token")
        return encode(target, [prompt])[0]
    return conversations(target, None, [prompt])[0]


def _evaluated(
    evaluation: Evaluation,
    checkpoint: Checkpoint,
    records: Sequence[tuple[Any, Mapping[str, Any]]],
    score: Score,
) -> tuple[dict[str, Any], list[list[float]]]:
    """Returns a row of the report, and the scores [P][S] of a checkpoint."""
    target, samples, mark = evaluation.sampler.target, evaluation.samples, checkpoint.mark()
    say(checkpoint.name)
    began = time.perf_counter()
    weights = None if evaluation.is_complete(mark) else checkpoint.weights(target)
    found = evaluation.texts(mark, weights)
    seconds = time.perf_counter() - began
    scores: list[list[float]] = []
    for number, text in enumerate(found["text"]):
        index, sample = divmod(number, samples)
        prompt, fields = records[index]
        if sample == 0:
            scores.append([])
        try:
            scores[-1].append(score(prompt, text, fields))
        except ValueError as error:
            raise ValueError(
                f"{error}; it was called for {checkpoint.name}, prompt {index}, sample {sample}"
            ) from error.__cause__
    new = sum(map(len, found["tokens"][len(found["tokens"]) - found["new"] :]))
    row = {
        "checkpoint": checkpoint.name,
        "path": str(checkpoint.path),
        "tokens": sum(map(len, found["tokens"])),
        "ended": sum(found["ended"]) / len(found["ended"]),
        "new_texts": found["new"],
        "tokens_per_pass": new / found["passes"] if found["passes"] else None,
        "seconds": seconds,
    }
    return row, scores


def _print_table(report: Mapping[str, Any]) -> None:
    print(
        "{prompts} prompts, {samples} samples each, {max_new_tokens} new tokens at most, "
        "temperature {temperature:g}, {dtype}; {score}; {device}, jax {jax}; ".format(**report)
        + "95 % intervals over prompts, of differences for the same prompts and noise\n"
    )
    columns = ("checkpoint", "score", "over the first", "over the previous", "tokens a pass")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in report["checkpoints"]:
        own = (row["mean"], *(row["interval"] or ()))
        pace = row["tokens_per_pass"]
        cells = [
            row["checkpoint"], show(own, ".3f"), show(row["to_first"], "+.3f"),
            show(row["to_previous"], "+.3f"), "kept" if pace is None else f"{pace:.2f}",
        ]  # fmt: skip
        print(f"| {' | '.join(cells)} |")
