"""Writes the records of a run: `run.json`, `metrics.jsonl`, TensorBoard events."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import pathlib
import platform
import time
from collections.abc import Mapping
from typing import Any, Protocol, SupportsFloat

import jax

from specjax._internal.checks import settle
from specjax._internal.extras import imported
from specjax.options.fields import Options, flag
from specjax.parallel import leader
from specjax.types import Json

RUN, METRICS = "run.json", "metrics.jsonl"
Run = dict[str, dict[str, Any]]
"""The content of `run.json`."""

_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "tokenizers",
    "safetensors",
)


def versions() -> dict[str, str]:
    """Returns the versions of everything that could change the numbers of a run."""
    import specjax

    packages = {name: importlib.metadata.version(name) for name in _PACKAGES}
    device = jax.devices()[0]
    return {
        "specjax": specjax.__version__,
        "python": platform.python_version(),
        **packages,
        "device": f"{jax.device_count()} x {device.device_kind} ({device.platform})",
    }


def num_params(arrays: object) -> int:
    """Returns the number of parameters in a tree of arrays or of shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(arrays))


def named(folder: str | None, model: object, parameters: object) -> dict[str, Json]:
    """Returns a model's entry in `run.json`: its folder, its family and sizes, and its parameters.

    Args:
      folder: where it comes from; None: it is new.
      model: its configuration, a dataclass.
      parameters: their number, or arrays or shapes that are counted.
    """
    if not isinstance(parameters, int):
        parameters = num_params(parameters)
    sizes = ("family", "num_layers", "hidden_size", "vocab_size", "max_positions")
    return {
        "folder": folder,
        **{name: value for name, value in vars(model).items() if name in sizes},
        "parameters": parameters,
    }


def describe(
    path: pathlib.Path,
    options: Options,
    inputs: Mapping[str, str],
    state: object,
    resumed: bool,
    facts: Mapping[str, Json] | None = None,
    accept_changes: bool = False,
) -> None:
    """Writes `run.json`: options, versions, hashes of the inputs, and the shapes of the state.

    `facts` are further entries, which are not compared.

    Raises:
      ValueError: a resumed run has a state of other shapes; or its inputs or its fixed options have
        changed, or `run.json` cannot be read, without `accept_changes`.
    """
    shapes = {
        jax.tree_util.keystr(p): list(x.shape)
        for p, x in jax.tree_util.tree_leaves_with_path(state)
    }
    now = {
        **(facts or {}),
        "options": dataclasses.asdict(options),
        "versions": versions(),
        "inputs": dict(inputs),
        "shapes": shapes,
    }
    now = json.loads(json.dumps(now))  # JSON turns tuples into lists
    before = read_run(path, accept_changes) if resumed else None
    if before is not None:
        _compare(path.parent, options, before, now, accept_changes)
    if leader():
        write(path, json.dumps(now, indent=2) + "\n")


def _compare(folder: pathlib.Path, options: Options, before: Run, now: Run, free: bool) -> None:
    """Raises ValueError for a run that cannot go on; with `free`, changes are accepted."""
    is_old = "optimizer" not in before["options"]
    settle(
        (
            is_old,
            f"{folder} was written by an earlier version of specjax, whose optimizers had another "
            "state: finish it with that version, or begin another --out from its weights "
            f"(--initial {folder / 'best'})",
        ),
        (
            not is_old and before["shapes"] != now["shapes"],
            f"{folder} is a run of another job, or of a model of other sizes: choose another --out",
        ),
    )
    changes = changed_options(options, before["options"], now["options"])
    hashes = {
        name: [each["inputs"].get(name, "none") for each in (before, now)]
        for name in sorted({*before["inputs"], *now["inputs"]})
    }
    changes += [
        f"the {name} has changed: sha256 {was:.12}, {is_now:.12}"
        for name, (was, is_now) in hashes.items()
        if was != is_now
    ]
    if changes and not free:
        raise ValueError(
            f"{folder} cannot be resumed as it is:\n  "
            + "\n  ".join(changes)
            + "\nchoose another --out, or pass --accept-changes to continue with the changes"
        )


def changed_options(
    options: Options, before: Mapping[str, object], now: Mapping[str, object]
) -> list[str]:
    """Returns a line for each option that differs, and may not change when a run is resumed."""
    free = {field.name for field in dataclasses.fields(options) if field.metadata.get("free")}
    return [
        f"{flag(name)} was {before[name]} and is {now[name]}"
        for name in sorted(before.keys() & now.keys() - free)
        if before[name] != now[name]
    ]


def read_run(path: pathlib.Path, accept_changes: bool) -> Run | None:
    """Returns the `run.json` of a resumed run; None if it is damaged and changes are accepted."""
    try:
        run = json.loads(path.read_bytes())
        if not all(isinstance(run[name], dict) for name in ("options", "inputs", "shapes")):
            raise TypeError("a part of it is missing")
    except (OSError, ValueError, KeyError, TypeError) as error:
        if accept_changes:
            return None
        raise ValueError(
            f"{path} cannot be read ({error!r}), so nobody can tell whether the options and the "
            "inputs are those of the run: bring it back from a copy, or pass --accept-changes to "
            "resume without this check and to write the file again"
        ) from None
    return run


def write(path: pathlib.Path, text: str) -> None:
    """Writes a file atomically: a process that is killed leaves the old file or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)


def read_metrics(path: pathlib.Path) -> list[dict[str, float]]:
    """Returns the lines of a `metrics.jsonl`, without a last line that was cut off."""
    lines, texts = [], path.read_bytes().split(b"\n") if path.exists() else []
    for number, text in enumerate(texts, start=1):
        if number == len(texts) and not text:
            break
        try:
            line = json.loads(text)
            if not isinstance(line, dict) or not isinstance(line["step"], int):
                raise TypeError("it must be an object with a step")
        except (ValueError, KeyError, TypeError) as error:
            if number == len(texts):  # a process was killed while it wrote the line
                break
            raise ValueError(f"{path}, line {number}, cannot be read: {error!r}") from None
        lines.append(line)
    return lines


def last_evaluation(path: pathlib.Path, step: int) -> dict[str, float]:
    """Returns the report of the last evaluation up to `step` in a `metrics.jsonl`, or {}."""
    reports = [
        line
        for line in read_metrics(path)
        if line["step"] <= step and "loss" not in line  # a line of training has one
    ]
    return {name: value for name, value in (reports or [{}])[-1].items() if name != "step"}


class EventWriter(Protocol):
    """The methods of `tensorboardX.SummaryWriter` that are used."""

    def add_scalar(self, tag: str, scalar_value: float, step: int, *, walltime: float) -> None: ...

    def close(self) -> None: ...


class Metrics:
    """Writes `metrics.jsonl`, with one JSON object per line.

    Lines after the step that a run resumes from are removed.  The lines before it are those of
    `copy`, the checkpoint's copy of the file, if there is one.  With several processes only the
    first one writes.
    """

    def __init__(
        self,
        path: pathlib.Path,
        step: int,
        tensorboard: bool = False,
        copy: pathlib.Path | None = None,
    ) -> None:
        self._path, self._events = None, None
        if not leader():
            return
        if copy is not None:
            now = path.read_bytes() if path.exists() else b""
            if not now.startswith(copy.read_bytes()):
                print(f"{path} was damaged; its lines are those of {copy} again", flush=True)
        lines = read_metrics(copy or path) if step else []
        earlier = [line for line in lines if line["step"] <= step]
        write(path, "".join(json.dumps(line) + "\n" for line in earlier))
        self._path = path
        self._events = _event_writer(path.parent / "tensorboard", step) if tensorboard else None

    def write(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        if self._path is None:
            return
        # Significant digits, not decimal places: a learning rate may be less than a millionth.
        rounded = {name: float(f"{float(value):.7g}") for name, value in values.items()}
        with open(self._path, "a") as file:
            file.write(json.dumps({"step": step, **rounded}) + "\n")
        if self._events is not None:
            for name, value in rounded.items():
                self._events.add_scalar(name, value, step, walltime=time.time())

    def close(self) -> None:
        if self._events is not None:
            self._events.close()


def _event_writer(folder: pathlib.Path, step: int) -> EventWriter:
    tensorboard = imported(
        "tensorboardX",
        "--tensorboard needs the package tensorboardX: pip install tensorboardX; metrics.jsonl "
        "holds the same metrics",
    )
    return tensorboard.SummaryWriter(str(folder), purge_step=step + 1)
