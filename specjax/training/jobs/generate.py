"""specjax train generate: the target writes a dataset to train a draft on.

It continues prompts or windows of text.  It decodes with speculation: with the rule `match` every
proposer gives the same tokens as none, only faster.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib

from specjax._internal.checks import settle
from specjax.decoding import Decoder
from specjax.generation import encode_file
from specjax.models import LanguageModel
from specjax.options.command import parse
from specjax.options.fields import count, option
from specjax.parallel import leader
from specjax.rules import RULES
from specjax.serve import ray_pool
from specjax.training import dataset
from specjax.training.corpus import TextOptions
from specjax.training.dataset import Request, model_hashes
from specjax.training.lock import alone
from specjax.training.record import versions, write
from specjax.training.speculation import SpeculationOptions, load_speculation
from specjax.training.targets import dtype_of
from specjax.training.tokenising import prepare
from specjax.types import Json, Params


@dataclasses.dataclass(frozen=True)
class GenerateOptions(SpeculationOptions, TextOptions):
    """The models, the prompts, and the output folder."""

    group = "dataset"

    prompts: str | None = option(
        None, 'JSON lines, {"prompt": "..."} or {"messages": [...]}, to answer once each'
    )
    data: tuple[str, ...] = option(
        (), "folders (or files) of text whose windows are continued, instead of --prompts"
    )
    temperature: float = option(
        1.0, "sampling temperature, by default the one that train.distill learns for; 0: greedy"
    )
    sequences: int = count(1024, "number of windows to continue")
    prompt_tokens: int = count(32, "tokens per window")
    batch_size: int = count(16, "sequences decoded at once, and per file")
    top_log_probs: int = count(
        0, "record this many of the most likely tokens at each position, with log-probabilities", 0
    )
    out: str = option("runs/data", "folder of the dataset")
    ray_workers: int | None = option(
        None, "so many processes, which Ray Data starts and watches; the dataset is the same",
        metavar="N", free=True,
    )  # fmt: skip

    def __post_init__(self):
        super().__post_init__()
        settle(
            (
                not RULES[self.rule]().exact,
                f"--rule {self.rule} changes the distribution: the text would not be the target's",
            ),
            (
                bool(self.prompts) == bool(self.data),
                "pass --prompts with a file of prompts or --data with folders of text, not both",
            ),
            (
                self.ray_workers is not None and self.ray_workers < 1,
                f"--ray-workers {self.ray_workers} must be at least 1",
            ),
            (
                self.ray_workers is not None and self.coordinator is not None,
                "--ray-workers starts processes that know nothing of each other: leave "
                "--coordinator out",
            ),
        )


def main(argv: list[str] | None = None) -> None:
    options = parse(GenerateOptions, argv, __doc__)
    with alone(options.out):
        generate(options)


@dataclasses.dataclass(frozen=True)
class _Job:
    """The dataset, and what writes it."""

    out: pathlib.Path
    request: Request
    target: LanguageModel
    decoder: Decoder
    params: Params
    prompts: list[list[int]]

    def part(self, number: int) -> list[list[int]]:
        rows = self.request.batch
        return self.prompts[number * rows : (number + 1) * rows]

    def __call__(self, parts: list[dict[str, Json]]) -> list[dict[str, Json]]:
        """Writes shards, as a worker of a pool."""
        for part in parts:
            number = int(str(part["row"]))
            path = dataset.shard_path(self.out, number)
            dataset.write_shard(
                path, self.request, self.decoder, self.params, self.part(number), number
            )
        return parts


def generate(options: GenerateOptions) -> None:
    """Runs the job in a folder that the caller holds."""
    job = _job(options)
    if options.ray_workers is not None:
        dataset.begin(job.out, job.request)
        parts: list[list[dict[str, Json]]] = [
            [{"row": number}] for number in dataset.missing(job.out, job.request)
        ]
        for _ in ray_pool(options.ray_workers)(functools.partial(_job, options), parts):
            pass
    dataset.write(job.out, job.request, job.decoder, job.params, job.part, job.target.tokenizer)
    if leader():
        facts = {"options": dataclasses.asdict(options), "versions": versions()}
        write(job.out / "run.json", json.dumps(facts, indent=2) + "\n")
    made = dataset.read_manifest(job.out)
    counts = f"{made['sequences']} sequences, {made['new_tokens']} new tokens"
    print(f"wrote {job.out}: {counts}", flush=True)


def _job(options: GenerateOptions) -> _Job:
    """Loads the models and the prompts; in a worker, too."""
    out, rows = pathlib.Path(options.out), options.batch_size

    def windows(target: LanguageModel) -> list[list[int]]:
        _, text, _ = prepare(
            options.source, out / "corpus", target.model.vocab_size, options.tokenizer_file
        )
        found = text.rows(options.prompt_tokens - 1, options.seed)
        return [found[number]["tokens"].tolist() for number in range(options.sequences)]

    def lines(target: LanguageModel) -> list[list[int]]:
        return encode_file(target, pathlib.Path(str(options.prompts)))

    target, decoder, params, prompts = load_speculation(
        options, lines if options.prompts else windows
    )
    origin = hashlib.sha256()
    for ids in prompts:
        origin.update(json.dumps(ids).encode())
    request = Request(
        model_hashes(options.target, options.lora),
        len(prompts),
        rows,
        options.max_new_tokens,
        options.settings,
        options.seed,
        options.top_log_probs,
        origin.hexdigest(),
        dtype_of(options.dtype),
    )
    return _Job(out, request, target, decoder, params, prompts)
