"""The options of every job that trains: its devices, the optimizer and the loop."""

from __future__ import annotations

import dataclasses

from specjax.options.fields import Options, above, at_least, option, within
from specjax.options.processes import ProcessOptions
from specjax.training.optimizers import ADAMW, OPTIMIZERS, check_arguments

SCHEDULES = ("wsd", "cosine")


@dataclasses.dataclass(frozen=True)
class MeshOptions(ProcessOptions):
    """The devices and processes of a run, which may be resumed on others."""

    mesh: str | None = option(
        None,
        "devices along each axis, as data=2,fsdp=2,model=2; without it, one device",
        free=True,
    )


@dataclasses.dataclass(frozen=True)
class OptimizerOptions(Options):
    """The options of the optimizer."""

    group = "optimizer"

    steps: int = option(1000, "optimizer steps", free=True)
    batch_size: int = option(4, "sequences per step")
    accumulate: int = option(
        1, "parts into which a batch is split, read one after the other to save memory"
    )
    optimizer: str = option(
        ADAMW,
        "optimizer of optax; muon changes the matrices of layers, and AdamW the other parameters",
        choices=OPTIMIZERS,
    )
    optimizer_args: tuple[str, ...] = option(
        (), "further arguments of that function of optax, such as b1=0.95"
    )
    learning_rate: float = option(2e-3, "peak learning rate")
    schedule: str = option(
        "wsd",
        "schedule of the learning rate; wsd: constant, with a linear decay at the end",
        choices=SCHEDULES,
    )
    warmup_steps: int = option(200, "steps of linear warm-up; fewer if the run is too short")
    warmup_fraction: float = option(
        0.0, "fraction of the run that is warm-up; 0: --warmup-steps decides"
    )
    decay_fraction: float = option(
        0.2, "last fraction of the run, in which the rate of wsd falls linearly to zero"
    )
    weight_decay: float = option(0.1, "weight decay, on matrices only")
    clip: float = option(1.0, "largest norm of the gradient")
    ema: float = option(
        0.0,
        "decay of a moving average of the parameters, which is evaluated and exported; 0: none",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "steps", "batch_size", "accumulate")
        at_least(self, 0, "warmup_steps", "weight_decay")
        above(self, 0, "learning_rate")
        within(self, 0, 1, "decay_fraction", "warmup_fraction")
        check_arguments(self.optimizer, self.optimizer_args)
        if not self.clip > 0:
            raise ValueError(f"--clip is {self.clip}; it must be greater than 0 (inf: no clipping)")
        if not 0 <= self.ema < 1:
            raise ValueError(f"--ema is {self.ema}; it must lie in [0, 1): 1 averages nothing")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"--accumulate is {self.accumulate}; "
                f"it must divide --batch-size, which is {self.batch_size}"
            )

    @property
    def warmup(self) -> int:
        """The requested steps of warm-up."""
        by_fraction = round(self.steps * self.warmup_fraction)
        return by_fraction if self.warmup_fraction else self.warmup_steps


@dataclasses.dataclass(frozen=True)
class LoopOptions(OptimizerOptions, MeshOptions):
    """The options of every job that trains."""

    group = "run"

    out: str = option(
        "runs/run", "folder of the run: checkpoints, metrics and the final model", free=True
    )
    sequence_length: int = option(512, "tokens per sequence")
    seed: int = option(0, "seed of initialisation, data order and sampling")
    log_every: int = option(50, "steps between lines of metrics")
    eval_every: int = option(500, "steps between evaluations")
    save_every: int = option(500, "steps between checkpoints; the last three are kept", free=True)
    patience: int = option(
        0, "stop after this many evaluations without improvement; 0: never", free=True
    )
    stop_at: int = option(
        0, "save and stop after this step, to be resumed later; 0: run to the end", free=True
    )
    tensorboard: bool = option(
        False, "write TensorBoard events too (needs tensorboardX)", free=True
    )
    curves: bool = option(False, "draw the metrics at the end (needs matplotlib)", free=True)
    show_mask: bool = option(
        False, "print the first batch with the learned tokens in colour, and exit", free=True
    )
    accept_changes: bool = option(
        False, "resume even if options, text, tokenizer or target have changed", free=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "sequence_length", "log_every", "eval_every", "save_every")
        at_least(self, 0, "patience", "stop_at")
        within(self, 0, 2**32 - 1, "seed")
