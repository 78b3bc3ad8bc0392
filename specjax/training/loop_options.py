"""The options of every job that trains."""

from __future__ import annotations

import dataclasses

from specjax.options.fields import at_least, option, within
from specjax.training.mesh import MeshOptions
from specjax.training.optimizer import OptimizerOptions


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
