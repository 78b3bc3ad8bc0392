"""Reads a recording of `train.teacher` as the data of a run, instead of a target in memory."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax.files import read_outline
from specjax.models import LanguageModel, LinenModel, Transformer
from specjax.options.fields import as_argument, flag, option
from specjax.training import tables
from specjax.training.dataset import model_hashes
from specjax.training.loop import LoopOptions
from specjax.training.material import Material, TargetDataOptions
from specjax.training.measure import EvaluationOptions
from specjax.training.ordering import Rows, numbered
from specjax.training.recorded import CANDIDATES, STATES, Recorded
from specjax.training.targets import dtype_of, load_target
from specjax.training.trees import Tree


@dataclasses.dataclass(frozen=True)
class TaughtOptions(LoopOptions, EvaluationOptions, TargetDataOptions):
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

    prompt: ClassVar[str] = "sampled_prompt"
    """The option with the tokens of a held-out prompt."""

    online = learn_prompts = isolate_documents = False  # some jobs have options of these names

    def __post_init__(self) -> None:
        super().__post_init__()
        length = getattr(self, self.prompt)
        measures = self.measures_tau and (self.target or not self.teacher)  # else it is refused
        if measures and length + self.eval_tokens > self.sequence_length:
            raise ValueError(
                f"{flag(self.prompt)} {length} and --eval-tokens {self.eval_tokens} together are "
                f"more than --sequence-length {self.sequence_length}"
            )

    @property
    def measures_tau(self) -> bool:
        """Returns whether the target itself is needed, for measuring."""
        return bool(self.eval_prompts)

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


@dataclasses.dataclass(frozen=True)
class RecordedMaterial(Material):
    """The sequences of a recording, whose rows have the target's outputs, too."""

    teacher: Recorded = dataclasses.field(kw_only=True)

    @classmethod
    def of(cls, teacher: Recorded, share: float | None = None) -> RecordedMaterial:
        hashes = {**teacher.request.hashes, "teacher": teacher.hash}
        return cls(None, None, teacher.held_out_rows(), hashes, share, teacher=teacher)

    def batches(
        self, length: int, size: int, seed: int, share: float, own: float = 0.0, whole: bool = False
    ) -> Rows:
        return self.teacher.batches(size, share, seed, whole)

    def token_counts(self, vocab_size: int) -> np.ndarray:
        return self.teacher.token_counts()

    def test(self, length: int, size: int) -> Rows:
        return numbered(lambda index: self.teacher.held_out(index * size, size))


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
        {**(each if settings else {}), "isolate_documents": isolated, "sequence_length": length}
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


def target_of(teacher: Recorded, options: TaughtOptions, mesh: Mesh | None) -> LanguageModel:
    """Returns the target of a recording.

    If nothing is measured with the target itself, it has the parameters of the recording: none, or
    those that drafters share.

    Raises:
      ValueError: the recording has no tokenizer.
    """
    dtype = teacher.request.dtype
    if options.measures_tau:
        return load_target(options, dtype, mesh)
    outline = read_outline(teacher.folder)
    if outline.tokenizer is None:
        raise ValueError(f"--teacher {teacher.folder} has no tokenizer.json: record it again")
    has_states = STATES in teacher.names
    model = LinenModel(Transformer(outline.config), jnp.dtype(dtype) if has_states else jnp.float32)
    params: Tree = tables.unpacked(teacher.folder, model, mesh) if has_states else {}
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
