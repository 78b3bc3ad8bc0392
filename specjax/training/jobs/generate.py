"""specjax train generate: the target writes a dataset to train a draft on.

It continues prompts or windows of text.  It decodes with speculation: with the rule `match` every
proposer gives the same tokens as none, only faster.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib

from specjax._internal.checks import settle
from specjax.generation import encode_file
from specjax.models import LanguageModel
from specjax.options.command import parse
from specjax.options.fields import count, option
from specjax.parallel import leader
from specjax.rules import RULES
from specjax.training import dataset
from specjax.training.corpus import TextOptions
from specjax.training.dataset import Request, model_hashes
from specjax.training.lock import alone
from specjax.training.record import versions, write
from specjax.training.speculation import SpeculationOptions, load_speculation
from specjax.training.targets import dtype_of
from specjax.training.tokenising import prepare


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
        )


def main(argv: list[str] | None = None) -> None:
    options = parse(GenerateOptions, argv, __doc__)
    with alone(options.out):
        generate(options)


def generate(options: GenerateOptions) -> None:
    """Runs the job in a folder that the caller holds."""
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
    dataset.write(
        out,
        request,
        decoder,
        params,
        lambda n: prompts[n * rows : (n + 1) * rows],
        target.tokenizer,
    )
    if leader():
        facts = {"options": dataclasses.asdict(options), "versions": versions()}
        write(out / "run.json", json.dumps(facts, indent=2) + "\n")
    made = dataset.read_manifest(out)
    counts = f"{made['sequences']} sequences, {made['new_tokens']} new tokens"
    print(f"wrote {out}: {counts}", flush=True)
