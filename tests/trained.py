"""A small model of Python code, trained once per session and shared by the training tests."""

from __future__ import annotations

import atexit
import functools
import pathlib
import tempfile

from quadratic_job import metrics as metrics

from specjax.training.jobs import pretrain

_root = tempfile.TemporaryDirectory(prefix="specjax-tests-")
atexit.register(_root.cleanup)
ROOT = pathlib.Path(_root.name)
SOURCE = pathlib.Path(__file__).parent.parent
DRAFT_SIZES = [
    *(
        "--hidden-size",
        "16",
        "--mlp-size",
        "32",
        "--num-layers",
        "1",
        "--num-heads",
        "2",
        "--num-kv-heads",
        "1",
    ),
    *("--sequence-length", "32", "--batch-size", "4", "--eval-batches", "2"),
]
SIZES = ["--vocab-size", "300", *DRAFT_SIZES]
STEPS = ["--steps", "20", "--save-every", "5", "--eval-every", "10", "--log-every", "4",
         "--warmup-steps", "2", "--learning-rate", "0.01"]  # fmt: skip


@functools.cache
def text() -> pathlib.Path:
    """A folder with a few small Python files of the library."""
    folder = ROOT / "text"
    folder.mkdir()
    for path in sorted((SOURCE / "specjax" / "auditing").glob("*.py"))[:8]:
        (folder / f"{path.parent.name}-{path.name}").write_text(path.read_text())
    return folder


def command(out: pathlib.Path, *more: str) -> list[str]:
    return ["--data", str(text()), "--out", str(out), *STEPS, *SIZES, *more]


@functools.cache
def run() -> pathlib.Path:
    """A run of 20 steps without interruption."""
    pretrain.main(command(ROOT / "run"))
    return ROOT / "run"


def target() -> pathlib.Path:
    return run() / "model"
