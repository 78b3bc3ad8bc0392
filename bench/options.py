"""The options of `python -m bench`."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import tempfile

from bench.peers.engines import ENGINES
from bench.weights import SIZES
from specjax.options import fields


@dataclasses.dataclass(frozen=True)
class SharedOptions(fields.Options):
    """The options that hold for all reports of a call."""

    size: str | None = fields.option(
        None, "use random weights of this many parameters", choices=sorted(SIZES)
    )
    target: str | None = fields.option(None, "folder of a target; default: the shipped pair")
    draft: str | None = fields.option(None, "folder of the draft")
    dtype: str = fields.option("float32", "float32 or bfloat16, for weights and KV cache")
    num_drafts: tuple[int, ...] = fields.option((1, 2, 4, 6, 8), "numbers of drafts")
    prompt_file: str | None = fields.option(
        None, "real prompts, as for specjax bench; default: random, or those of the shipped pair"
    )
    limit_prompts: int = fields.option(0, "use only this many real prompts; 0 uses all")
    new_tokens: int = fields.option(64, "tokens of a text")
    synthetic_acceptance: float | None = fields.option(
        None, "impose this probability that a draft is right"
    )
    proposers: tuple[str, ...] = fields.option(
        ("draft", "ngram"), "proposers of specjax", choices=("draft", "ngram")
    )
    int8: bool = fields.option(
        False, "also measure int8: target, draft, and the target as its own draft"
    )
    int4: bool = fields.option(False, "also measure int4, in the same cases")
    peers: tuple[str, ...] = fields.option(
        ("plain", "draft", "ngram"),
        "what transformers runs, if anything; loop is a compiled PyTorch loop",
        choices=("plain", "draft", "ngram", "loop"),
    )
    compiled: bool = fields.option(False, "also run transformers plain under torch.compile")
    engines: tuple[str, ...] = fields.option(
        (),
        "engines of the extra [peers] that run what --peers names, in a process each",
        choices=tuple(ENGINES),
    )
    engine_python: str | None = fields.option(
        None, "interpreter of the environment that has the engines; default: this one"
    )
    rounds: int = fields.option(5, "measured turns")
    seconds: float = fields.option(math.inf, "leave out contestants that do not fit in this time")
    weights: str = fields.option(
        str(pathlib.Path(tempfile.gettempdir()) / "specjax-bench"),
        "folder for random weights; `device` draws them on the device and writes no file",
    )
    json: str | None = fields.option(None, "write the list of reports to this file")
    plot: str | None = fields.option(None, "draw speed and speed-up against the number of drafts")


@dataclasses.dataclass(frozen=True)
class BenchOptions(SharedOptions):
    """The options of `python -m bench`, which writes a report for each combination."""

    group = "report"

    vocab_size: tuple[int, ...] = fields.option((32000,), "vocabulary sizes of random weights")
    batch: tuple[int, ...] = fields.option((1,), "numbers of prompts decoded together")
    prompt_length: tuple[int, ...] = fields.option(
        (), "how many of a prompt's last tokens to use; default: 32 if random, 96 if real"
    )


@dataclasses.dataclass(frozen=True)
class ReportOptions(SharedOptions):
    """The options of one report."""

    vocab_size: int = 32000
    batch: int = 1
    prompt_length: int | None = None
