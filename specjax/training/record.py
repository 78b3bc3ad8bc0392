"""What a run writes beside its checkpoints: `run.json`, `metrics.jsonl`, and TensorBoard's events if asked."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import pathlib
import platform
import time
from typing import Any

import jax

from specjax.parallel import leader
from specjax.training.options import flag

_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "tokenizers",
    "safetensors",
)


def versions() -> dict[str, str]:
    """Of everything that could change the numbers of a run."""
    import specjax

    found = {name: importlib.metadata.version(name) for name in _PACKAGES}
    device = jax.devices()[0]
    return {
        "specjax": specjax.__version__,
        "python": platform.python_version(),
        **found,
        "device": f"{jax.device_count()} x {device.device_kind} ({device.platform})",
    }


def describe(
    path: pathlib.Path, options: Any, inputs: dict[str, str], state: Any, resumed: bool
) -> None:
    """Write `run.json`: the resolved options, the versions, the hashes of what the run reads, and its state's shapes.

    Raises:
      ValueError: a resumed run has a state of other shapes; or it has other inputs, or other values of options that
        may not change in a run, and no `options.accept_changes`.
    """
    shapes = {
        jax.tree_util.keystr(p): list(x.shape)
        for p, x in jax.tree_util.tree_leaves_with_path(state)
    }
    now = {
        "options": dataclasses.asdict(options),
        "versions": versions(),
        "inputs": inputs,
        "shapes": shapes,
    }
    now = json.loads(json.dumps(now))  # as it reads back: tuples are lists
    if resumed and path.exists() and json.loads(path.read_text())["shapes"] != shapes:
        raise ValueError(
            f"{path.parent} is a run of another job, or of a model of other sizes: choose another --out"
        )
    if resumed and path.exists() and not options.accept_changes:
        before = json.loads(path.read_text())
        free = {field.name for field in dataclasses.fields(options) if field.metadata.get("free")}
        names = sorted(set(before["options"]) & set(now["options"]) - free)
        changes = [
            f"{flag(name)} was {before['options'][name]} and is {now['options'][name]}"
            for name in names
            if before["options"][name] != now["options"][name]
        ]
        changes += [
            f"the {name} has changed: sha256 {before['inputs'].get(name, 'none'):.12}, {inputs.get(name, 'none'):.12}"
            for name in sorted({*before["inputs"], *inputs})
            if before["inputs"].get(name) != inputs.get(name)
        ]
        if changes:
            raise ValueError(
                f"{path.parent} cannot be resumed as it is:\n  "
                + "\n  ".join(changes)
                + "\nchoose another --out, or pass --accept-changes to go on with what is there now"
            )
    if leader():
        write(path, json.dumps(now, indent=2) + "\n")


def write(path: pathlib.Path, text: str) -> None:
    """Replace a file by a whole one, whenever the process ends."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; the last one may have been cut off."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found


class Metrics:
    """`metrics.jsonl`: a JSON object a line.  Lines past the step that a run resumes from are dropped.

    Of several processes the first writes.
    """

    def __init__(self, path: pathlib.Path, step: int, tensorboard: bool = False):
        self._path, self._events = None, None
        if not leader():
            return
        kept = [line for line in read_metrics(path) if line["step"] <= step]
        write(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._path = path
        self._events = _event_writer(path.parent / "tensorboard", step) if tensorboard else None

    def write(self, step: int, values: dict[str, Any]) -> None:
        if self._path is None:
            return
        # By digits and not by places: a learning rate may be smaller than a millionth.
        rounded = {name: float(f"{float(value):.7g}") for name, value in values.items()}
        with open(self._path, "a") as file:
            file.write(json.dumps({"step": step, **rounded}) + "\n")
        if self._events is not None:
            for name, value in rounded.items():
                self._events.add_scalar(name, value, step, walltime=time.time())

    def close(self) -> None:
        if self._events is not None:
            self._events.close()


def _event_writer(folder: pathlib.Path, step: int) -> Any:
    try:
        import tensorboardX  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise ValueError(
            "--tensorboard needs the package tensorboardX: pip install tensorboardX; metrics.jsonl holds the same"
        ) from None
    return tensorboardX.SummaryWriter(str(folder), purge_step=step + 1)
