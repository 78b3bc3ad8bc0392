"""The options of `train.distill`."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import ClassVar

from specjax.options.fields import at_least, option, within
from specjax.sampling import Sampling
from specjax.training.checkpoints import saved_steps
from specjax.training.divergences import DIVERGENCES
from specjax.training.mixture import WeightOptions
from specjax.training.record import RUN, read_run
from specjax.training.recordings import TaughtOptions
from specjax.training.student import SIZES, ModelOptions, Start
from specjax.training.targets import ServedOptions

ACCEPTED_LENGTH = "accepted-length"
AUTO = "auto"
_FLAT = ("total-variation", ACCEPTED_LENGTH)
"""Losses whose gradient nearly vanishes where draft and target share little probability."""


@dataclasses.dataclass(frozen=True)
class DistillOptions(ModelOptions, TaughtOptions, WeightOptions, ServedOptions):
    """The target, the data, the draft's sizes, and the loop."""

    group = "distillation"
    common = (
        "target", "dtype", "data", "teacher", "hidden_size", "num_layers", "num_heads",
        "initial", "like", "mesh", "steps", "batch_size", "learning_rate", "optimizer",
        "out", "sequence_length", "seed", "eval_every", "save_every", "curves", "loss",
        "num_drafts", "temperature", "top_k", "top_p", "sampled_fraction",
        "draft_fraction", "online", "sampled_sequences", "eval_prompts",
    )  # fmt: skip

    loss: str = option(
        "forward-kl",
        "training loss; auto: a short training with each of --auto-losses, and the one with the "
        "best tau",
        choices=(*DIVERGENCES, ACCEPTED_LENGTH, AUTO),
    )
    auto_losses: tuple[str, ...] = option(
        ("forward-kl", "jensen-shannon", "total-variation", "log-acceptance", "adaptive"),
        "losses that --loss auto compares",
        choices=tuple(DIVERGENCES),
    )
    auto_steps: int = option(0, "steps with each of them; 0: a twentieth of --steps, at least 20")
    auto_prompts: int = option(32, "held-out prompts on which their tau is measured")
    top: int = option(
        0,
        "let only so many of the target's likeliest tokens count one by one, and all others as "
        "one; 0: all of them, or as many as --teacher has",
    )
    anneal_steps: int | None = option(
        None,
        "steps over which the loss changes linearly from forward KL to --loss; 0: none; by default "
        "4/5 of --steps for total-variation and accepted-length without --initial, else none",
    )
    num_drafts: int = option(
        4, "draft tokens per step (gamma), for accepted-length, --online and --eval-prompts"
    )
    temperature: float = option(
        1.0, "temperature that the target will be served with; used for its text and in the loss"
    )
    top_k: int = option(0, "top-k that the target will be served with; 0: off")
    top_p: float = option(1.0, "top-p that the target will be served with; 1: off")
    sampled_fraction: float | None = option(
        None,
        "fraction of the sequences with answers: those in --data, else those that the target then "
        "writes; default: 1 without text and for accepted-length, else 0.5",
    )
    draft_fraction: float = option(
        0.0, "fraction of the sequences that the draft writes during the training step"
    )
    pack: bool = option(
        False,
        "put several short sequences with answers into one row; they do not attend to each other",
    )
    learn_prompts: bool = option(False, "also learn the prompts of sequences with answers")
    mix: str = option(
        "sequence",
        "whether every batch mixes the sources, or each batch has a single source",
        choices=("sequence", "batch"),
    )
    online: bool = option(
        False,
        "learn only inside speculation, from the target's logits at accepted and rejected drafts",
    )
    sampled_sequences: int = option(1024, "how many sequences the target writes")
    sampled_prompt: int = option(32, "tokens of text that the target or the draft continues")
    sampled_batch: int = option(16, "sequences that the target writes at once")
    eval_batches: int = option(32, "held-out batches per evaluation")
    eval_prompts: int = option(
        0, "held-out prompts on which tau is measured with the decoder; 0: none"
    )
    eval_tokens: int = option(64, "new tokens for each of them")
    like: str | None = option(
        None,
        "target, or the folder of a model whose family, positions and sizes a student with random "
        "weights has",
    )
    from_layers: tuple[int, ...] = option(
        (),
        "start from these layers of --like (default: the target), with its embedding, final norm "
        "and output matrix",
    )
    early_exit: int | None = option(
        None,
        "the draft is the first so many layers of the target with its output matrix, which all "
        "stay; a final norm for the exit is trained",
    )

    new_sizes: ClassVar[Mapping[str, int]] = dict(zip(SIZES, (128, 352, 1, 2, 1), strict=True))

    def __post_init__(self):
        super().__post_init__()
        self.check_weights(self.data)
        at_least(self, 1, "num_drafts", "sampled_sequences", "sampled_batch")
        at_least(self, 1, "eval_batches", "eval_tokens", "auto_prompts")
        at_least(self, 0, "eval_prompts", "top", "auto_steps")
        if self.anneal_steps is not None:
            at_least(self, 0, "anneal_steps")
        if self.early_exit is not None:
            at_least(self, 1, "early_exit")
            if self.dtype == "int8":
                raise ValueError(
                    "--early-exit writes the target's layers into a folder, which --dtype int8 "
                    "has rounded: pass float32 or bfloat16"
                )
        within(self, 0, 1, "draft_fraction")
        if self.sampled_fraction is not None:
            within(self, 0, 1, "sampled_fraction")
        Sampling.create(1, **self.settings)
        measured = self.eval_prompts or self.loss == AUTO
        continues = self.teacher is None or measured
        if continues and not 0 < self.sampled_prompt < self.sequence_length:
            raise ValueError(
                f"--sampled-prompt is {self.sampled_prompt}; it must be at least 1 and "
                f"shorter than a sequence (--sequence-length {self.sequence_length})"
            )
        share = self.sampled_fraction
        if share is not None and share + self.draft_fraction > 1:
            raise ValueError(
                f"--sampled-fraction {self.sampled_fraction} and --draft-fraction "
                f"{self.draft_fraction} add up to more than 1"
            )
        if self.loss == "reverse-kl" and (self.temperature == 0 or self.top_k or self.top_p < 1):
            raise ValueError(
                "--loss reverse-kl is infinite where the target gives a token no probability "
                "(--temperature 0, --top-k, --top-p): take jensen-shannon or total-variation"
            )
        if self.loss == ACCEPTED_LENGTH and (
            self.online or self.draft_fraction or (share is not None and share < 1)
        ):
            raise ValueError(
                "--loss accepted-length is a mean over text that the target wrote: pass "
                "--sampled-fraction 1, and neither --online nor --draft-fraction"
            )
        for loss in self.auto_losses if self.loss == AUTO else ():
            dataclasses.replace(self, loss=loss)  # raises ValueError where this loss cannot be
        self._check_teacher()
        if self.top and self.loss == ACCEPTED_LENGTH:
            raise ValueError("--loss accepted-length reads every token's probability: no --top")
        if self.pack and self.loss == ACCEPTED_LENGTH:
            raise ValueError(
                "--loss accepted-length needs to know where each sequence was cut: no --pack"
            )
        if self.num_drafts > self.sequence_length or (self.online and not self.online_steps):
            raise ValueError(
                f"--sequence-length {self.sequence_length} has no room for --num-drafts "
                f"{self.num_drafts}"
                + f" after --sampled-prompt {self.sampled_prompt}"
                * self.online
            )
        if measured and self.sampled_prompt + self.eval_tokens > self.sequence_length:
            raise ValueError(
                f"--sampled-prompt {self.sampled_prompt} and --eval-tokens {self.eval_tokens} "
                f"together are more than --sequence-length {self.sequence_length}"
            )

    def _check_teacher(self) -> None:
        """Raises ValueError for objectives that cannot be learned from a recording."""
        asks = {
            "--online": self.online,
            "--draft-fraction": self.draft_fraction,
            "--early-exit": self.early_exit is not None,
            f"--loss {ACCEPTED_LENGTH}": self.loss == ACCEPTED_LENGTH,
            "--pack": self.pack,
        }
        measures = {"--eval-prompts": self.eval_prompts, f"--loss {AUTO}": self.loss == AUTO}
        self.check_teacher(asks, measures)
        if self.teacher and self.from_layers and self.like is None and not self.target:
            raise ValueError(
                "--from-layers takes weights of the target: pass --target, too, or --like FOLDER"
            )

    @property
    def sources(self) -> dict[str, object]:
        given = {**super().sources, "early_exit": self.early_exit}
        return {name: value for name, value in given.items() if value}

    @property
    def auto(self) -> int:
        """The steps with each loss that `--loss auto` compares."""
        return self.auto_steps or min(self.steps, max(20, self.steps // 20))

    @property
    def model_like(self) -> str | None:
        by_default = self.like is None and self.from_layers
        return self.words if by_default or self.like == "target" else self.like

    @property
    def start(self) -> Start | None:
        if self.early_exit is None:
            start = super().start
            if start is not None and self.from_layers and start.folder == self.target:
                start = dataclasses.replace(start, lora=self.lora)
            return start
        layers = tuple(range(self.early_exit))
        name = f"--early-exit {self.early_exit}"
        return Start(self.target, name, layers=layers, lora=self.lora)

    @property
    def share_beside_text(self) -> float:
        """The default of `--sampled-fraction` if there is text."""
        return 1.0 if self.loss == ACCEPTED_LENGTH else min(0.5, 1 - self.draft_fraction)

    @property
    def settings(self) -> dict[str, float]:
        """The settings that the target is served with, as `Sampling.create` takes them."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}

    @property
    def online_steps(self) -> int:
        """The steps of speculation that fit into a sequence even if every draft is accepted."""
        return (self.sequence_length - self.sampled_prompt) // (self.num_drafts + 1)


def annealing(options: DistillOptions) -> int:
    """Returns `--anneal-steps`, or its default.

    A resumed run keeps the number that it began with.  A new run without `--initial` anneals for
    4/5 of its steps if its loss needs it, because a random draft shares little with the target.

    Raises:
      ValueError: the `run.json` of a resumed run cannot be read.
    """
    if options.anneal_steps is not None:
        return options.anneal_steps
    out = pathlib.Path(options.out)
    if saved_steps(out) and (run := read_run(out / RUN, options.accept_changes)) is not None:
        return run["options"].get("anneal_steps") or 0
    return options.steps * 4 // 5 if options.loss in _FLAT and options.initial is None else 0
