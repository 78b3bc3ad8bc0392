"""Reads a recording of `train.teacher` as the data of a run, instead of a target in memory."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jax.sharding import Mesh

from specjax.contract import Arrays
from specjax.files import read_outline
from specjax.models import LanguageModel, LinenModel, Transformer
from specjax.options.fields import as_argument, option
from specjax.training import tables
from specjax.training.corpus import TextOptions
from specjax.training.dataset import model_hashes
from specjax.training.loop_options import LoopOptions
from specjax.training.recorded import CANDIDATES, STATES, Recorded
from specjax.training.targets import TargetOptions, dtype_of, load_target


@dataclasses.dataclass(frozen=True)
class TaughtOptions(LoopOptions, TextOptions, TargetOptions):
    """The inputs of a run: a target in memory with data, or a recording."""

    group = "data"

    target: str = option("", "folder of the target, or org/name on the Hub")
    data: tuple[str, ...] = option(
        (), "folders or files: text of any ending, JSON lines, parquet, or datasets of Hugging Face"
    )
    teacher: str | None = option(
        None,
        "folder of train.teacher to learn from, instead of --data and a target in memory; with "
        "--target, the target is checked, and loaded for --eval-prompts alone",
    )

    @property
    def words(self) -> str:
        """The folder with the target's configuration and tokenizer."""
        return self.target or self.teacher or ""

    def check_teacher(self, asks: Mapping[str, object], measures: Mapping[str, object]) -> None:
        """Checks the options of a run with `--teacher`.

        Args:
          asks: options that need the target in every step, by their words.
          measures: options that need the target for measuring.

        Raises:
          ValueError: one of these is given, or data.
        """
        if self.teacher is None:
            return
        for name in (name for name, given in asks.items() if given):
            raise ValueError(
                f"{name} asks the target during training, and --teacher {self.teacher} has only "
                "what it said before: leave one of the two out"
            )
        if self.data:
            raise ValueError(
                f"--teacher {self.teacher} has the data that it was recorded on: leave out --data"
            )
        for name in (name for name, given in measures.items() if given and not self.target):
            raise ValueError(
                f"{name} measures tau with the target: pass --target, too, or leave it out"
            )

    def check_source(self) -> None:
        """Raises ValueError unless there is a recording, or a target with data."""
        if not self.teacher and not (self.target and self.data):
            raise ValueError(
                "pass --target and --data, or --teacher with a folder of train.teacher"
            )


def open_teacher(
    options: TaughtOptions,
    isolate_documents: bool,
    names: Sequence[str] = CANDIDATES,
    dtype: str | None = None,
    settings: Mapping[str, float] | None = None,
) -> Recorded:
    """Returns the recording in `options.teacher`.

    Args:
      options: of the run.
      isolate_documents: whether the run reads documents on their own.
      names: the arrays that the run reads.
      dtype: `--dtype`, if it was given.
      settings: the sampling settings that the run learns for; None: it reads no log-probabilities.

    Raises:
      ValueError: the recording is damaged or not complete, another target made it, or it was made
        for other options.
    """
    assert options.teacher is not None
    teacher = Recorded.open(pathlib.Path(options.teacher), names)
    request = teacher.request
    if options.target:
        _check_target(options, teacher, dtype)
    asked, found = (
        {
            **(each if settings else {}),
            "isolate_documents": isolated,
            "sequence_length": length,
        }
        for each, isolated, length in (
            (settings or {}, isolate_documents, options.sequence_length),
            (request.settings, request.isolate_documents, request.length),
        )
    )
    other = [name for name in asked if asked[name] != found[name]]
    if other:
        raise ValueError(
            f"--teacher {options.teacher} was recorded with "
            + " ".join(as_argument(name, found[name]) for name in other)
            + ", and this run has "
            + " ".join(as_argument(name, asked[name]) for name in other)
            + ": pass the former, or record it again"
        )
    return teacher


def target_of(
    teacher: Recorded, options: TaughtOptions, mesh: Mesh | None, whole: bool
) -> LanguageModel:
    """Returns the target of a recording.

    Args:
      teacher: the recording.
      options: of the run.
      mesh: of the run.
      whole: True if the target itself is needed.  Otherwise it has the parameters of the recording:
        none, or those that drafters share.

    Raises:
      ValueError: the recording has no tokenizer.
    """
    dtype = teacher.request.dtype
    if whole:
        return load_target(options, dtype, mesh)
    outline = read_outline(teacher.folder)
    if outline.tokenizer is None:
        raise ValueError(f"--teacher {teacher.folder} has no tokenizer.json: record it again")
    has_states = STATES in teacher.names
    model = LinenModel(Transformer(outline.config), jnp.dtype(dtype) if has_states else jnp.float32)
    params: Arrays = tables.unpacked(teacher.folder, model, mesh) if has_states else {}
    return outline.with_weights(model, params)


def share_of_answers(asked: float | None, teacher: Recorded) -> float:
    """Returns the fraction of sequences with answers.

    Args:
      asked: `--sampled-fraction`, if it was given.
      teacher: the recording.

    Raises:
      ValueError: the recording has no sequences of a kind that is asked for.
    """
    text, answers, _ = teacher.request.counts
    if asked is None:
        default = teacher.request.share
        return 0.0 if not answers else 1.0 if not text else 0.5 if default is None else default
    if (asked and not answers) or (asked < 1 and not text):
        raise ValueError(
            f"--sampled-fraction is {asked}; --teacher {teacher.folder} has {text} sequences of "
            f"text and {answers} with answers: leave it out"
        )
    return asked


def _check_target(options: TaughtOptions, teacher: Recorded, dtype: str | None) -> None:
    """Raises ValueError if another target, tokenizer or LoRA, or another type, was recorded."""
    wanted, made = model_hashes(options.target, options.lora), teacher.request.hashes
    for name in sorted({*wanted, *({"lora"} & made.keys())}):
        if made.get(name) != wanted.get(name):
            raise ValueError(
                f"--teacher {options.teacher} was recorded with another {name} (sha256 "
                f"{made.get(name, 'none'):.12}) than that of --target {options.target} "
                f"({wanted.get(name, 'none'):.12}): record it again with specjax train teacher"
            )
    if dtype is not None and dtype_of(dtype) != teacher.request.dtype:
        raise ValueError(
            f"--teacher {options.teacher} was recorded in {teacher.request.dtype}, not in --dtype "
            f"{dtype}: pass the former, or record it again"
        )
