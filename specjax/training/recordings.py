"""Reads a recording of `train.teacher` as the data of a run, instead of a target in memory."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import ClassVar, TypeVar

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax._internal.checks import settle
from specjax.files import read_outline
from specjax.models import LanguageModel, LinenModel, Transformer
from specjax.options.fields import Options, as_argument, count, flag, option
from specjax.training import tables
from specjax.training.dataset import model_hashes, other_hashes
from specjax.training.loop import LoopOptions, mesh_of_run
from specjax.training.material import Material, TargetDataOptions
from specjax.training.ordering import Rows, numbered
from specjax.training.recorded import CANDIDATES, STATES, Recorded
from specjax.training.targets import dtype_of, fitted, load_target
from specjax.training.trees import Tree


@dataclasses.dataclass(frozen=True)
class EvaluationOptions(Options):
    """The options of an evaluation on held-out data."""

    group = "evaluation"

    eval_batches: int = count(8, "held-out batches per evaluation")
    eval_prompts: int = count(
        0,
        "held-out prompts on which tau of a chain of drafts is measured with the decoder, and of "
        "drafters and heads greedily; 0: none",
        0,
    )
    eval_tokens: int = count(64, "new tokens for each of them")


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
        """Raises ValueError for data, or options that need the target, beside `--teacher`.

        Those in `asks` need it in every step; `--eval-prompts` and those in `measures`, to measure.
        """
        if self.teacher is None:
            return
        measures = {"--eval-prompts": self.eval_prompts, **measures}
        settle(
            *(
                (
                    given,
                    f"{name} asks the target during training, and --teacher {self.teacher} has "
                    "only what it said before: leave one of the two out",
                )
                for name, given in asks.items()
            ),
            (
                self.data,
                f"--teacher {self.teacher} has the data that it was recorded on: leave out --data",
            ),
            *(
                (
                    given and not self.target,
                    f"{name} measures tau with the target: pass --target, too, or leave it out",
                )
                for name, given in measures.items()
            ),
        )


TaughtT = TypeVar("TaughtT", bound=TaughtOptions)


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


def opened(
    options: TaughtT, settings: Mapping[str, float] | None = None
) -> tuple[TaughtT, LanguageModel, Recorded | None, Mesh | None]:
    """Returns the options, the target, the recording if there is one, and the mesh of a run.

    Args:
      options: of the run; a default `sequence_length` is cut to what the target can read.
      settings: the sampling settings that the run learns for; None: it learns from hidden states,
        and not from log-probabilities.

    Raises:
      ValueError: there is neither a recording nor a target with data; the recording is damaged or
        not complete, another target made it, or it was made for other options.
    """
    if not options.teacher and not (options.target and options.data):
        raise ValueError("pass --target and --data, or --teacher with a folder of train.teacher")
    mesh = mesh_of_run(options)
    if options.teacher:
        teacher = _open(options, options.teacher, settings)
        return options, _target_of(teacher, options, mesh), teacher, mesh
    # Jobs without this option load the target in float32.
    target = load_target(options, getattr(options, "dtype", "float32"), mesh)
    return fitted(options, target), target, None, mesh


def _open(options: TaughtOptions, folder: str, settings: Mapping[str, float] | None) -> Recorded:
    teacher = Recorded.open(pathlib.Path(folder), CANDIDATES if settings else (STATES,))
    request = teacher.request
    if options.target:
        _check_target(options, teacher)
    asked: dict[str, object] = {**(settings or {})}
    asked |= {name: getattr(options, name) for name in ("isolate_documents", "sequence_length")}
    found = {
        **request.settings,
        "isolate_documents": request.isolate_documents,
        "sequence_length": request.length,
    }
    other = [name for name in asked if asked[name] != found[name]]
    if other:
        was, now = (" ".join(as_argument(n, each[n]) for n in other) for each in (found, asked))
        raise ValueError(
            f"--teacher {folder} was recorded with {was}, and this run has {now}: pass the former, "
            "or record it again"
        )
    return teacher


def _target_of(teacher: Recorded, options: TaughtOptions, mesh: Mesh | None) -> LanguageModel:
    """Returns the target of a recording.

    If nothing is measured with the target itself, it has the parameters of the recording: none, or
    those that drafters share.
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
    """Returns the fraction of sequences with answers; `asked` is `--sampled-fraction`."""
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


def _check_target(options: TaughtOptions, teacher: Recorded) -> None:
    """Raises ValueError if another target, tokenizer or LoRA, or another type, was recorded."""
    made, dtype = teacher.request, getattr(options, "dtype", None)
    others = other_hashes(made.hashes, model_hashes(options.target, options.lora))
    settle(
        *(
            (
                True,
                f"--teacher {options.teacher} was recorded with another {name} (sha256 {before}) "
                f"than that of --target {options.target} ({now}): record it again with specjax "
                "train teacher",
            )
            for name, before, now in others
        ),
        (
            dtype is not None and dtype_of(dtype) != made.dtype,
            f"--teacher {options.teacher} was recorded in {made.dtype}, not in --dtype {dtype}: "
            "pass the former, or record it again",
        ),
    )
