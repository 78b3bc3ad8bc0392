"""A training job of ten numbers, whose program compiles in a tenth of a second:

    python -m tests.quadratic_job --out runs/quadratic --steps 100

It is a `loop.Job` like those of `specjax.training.jobs`: the loop, the checkpoints, the lock and
the signals do not know what they train.  So what holds for its runs holds for those of a real job,
which need a run of their own only for what the job itself does.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
import optax
import tokenizers

from specjax.options.command import parse, run
from specjax.training.loop import LoopOptions, fit
from specjax.training.optimizer import OptimizerOptions, make_optimizer
from specjax.training.ordering import Rows

SIZE = 10
SETTINGS: dict[str, Any] = {
    "steps": 12,
    "batch_size": 4,
    "save_every": 3,
    "eval_every": 3,
    "log_every": 2,
    "warmup_steps": 2,
}


class Stream(Protocol):
    """A text or a mixture of texts, as `Tokens` and `Mixture` are."""

    def rows(self, length: int, seed: int) -> Rows: ...


@dataclasses.dataclass(frozen=True)
class Quadratic:
    """Fits numbers to the mean of others.  Jobs of one size are equal, and share a program.

    Attributes:
      size: how many numbers.
      text: where the other numbers come from, as token ids; None: they are drawn.
      aim: the distance from 0 that is best.
      broken: a step whose batch is NaN.
      watch: called with "evaluate" before each evaluation, and with "export" after each export.
      inputs: as in `loop.Job`.
      words: a tokenizer for `show`.
    """

    size: int = SIZE
    text: Stream | None = dataclasses.field(default=None, compare=False)
    aim: float = dataclasses.field(default=0.0, compare=False)
    broken: int | None = dataclasses.field(default=None, compare=False)
    watch: Callable[[str], None] = dataclasses.field(default=lambda place: None, compare=False)
    inputs: dict[str, str] = dataclasses.field(
        default_factory=lambda: {"text": "a" * 64}, compare=False
    )
    words: tokenizers.Tokenizer | None = dataclasses.field(default=None, compare=False)

    @property
    def frozen(self) -> dict[str, Any]:
        return {}

    @property
    def tokenizer(self) -> tokenizers.Tokenizer | None:
        return self.words

    def init(self) -> dict[str, Any]:
        return {"x": jnp.zeros(self.size)}

    def batch(self, step: int) -> dict[str, np.ndarray]:
        if self.text is None:
            numbers = np.random.default_rng(step).normal(size=(4, self.size))
        else:
            numbers = self.text.rows(self.size - 1, 0).batch(4)[step]["tokens"]
        return {"y": numbers.astype(np.float32) * (np.nan if step == self.broken else 1)}

    def loss(self, params: Any, frozen: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        return jnp.mean((params["x"] - batch["y"]) ** 2), {}

    def evaluate(self, params: Any) -> dict[str, float]:
        self.watch("evaluate")
        return {"distance": float(np.abs(np.asarray(params["x"])).mean())}

    def goal(self, report: dict[str, float]) -> float:
        return -abs(report["distance"] - self.aim)

    def export(self, params: Any, folder: pathlib.Path) -> None:
        folder.mkdir()
        np.save(folder / "x.npy", np.asarray(params["x"]))
        self.watch("export")

    def show(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.arange(len(batch["y"]) * 3).reshape(-1, 3)
        return tokens, tokens[:, 1:] % 3 == 2


def settings(out: str | pathlib.Path, **changes: Any) -> LoopOptions:
    """The options of a run of 12 steps, with checkpoints and evaluations at 3, 6, 9 and 12."""
    return LoopOptions(out=str(out), **(SETTINGS | changes))


def train(
    out: str | pathlib.Path, job: Quadratic | None = None, **changes: Any
) -> dict[str, float]:
    """`fit` with the optimizer of its options; equal runs have the same one, and so one program."""
    options = settings(out, **changes)
    names = [field.name for field in dataclasses.fields(OptimizerOptions)]
    optimizer = _optimizer(tuple((name, getattr(options, name)) for name in names))
    return fit(job or Quadratic(), options, optimizer)


@functools.cache
def _optimizer(options: tuple[tuple[str, Any], ...]) -> optax.GradientTransformation:
    return make_optimizer(OptimizerOptions(**dict(options)))


@functools.cache
def second() -> float:
    """The distance at the second evaluation: with it as its aim, a job has its best model there."""
    with tempfile.TemporaryDirectory() as folder:
        return train(folder, stop_at=6)["distance"]


def exported(out: pathlib.Path, name: str = "model") -> np.ndarray:
    return np.load(out / name / "x.npy")


def metrics(out: pathlib.Path) -> list[dict[str, Any]]:
    """The metrics of a run without the times."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def main(argv: list[str] | None = None) -> None:
    fit(Quadratic(), parse(LoopOptions, argv, __doc__))


if __name__ == "__main__":
    run(main)
