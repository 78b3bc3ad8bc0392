"""The checkpoints of a run, each with the hashes of its files.

    state/15/default/...      what Orbax writes
    state/15/data.json        the state of grain's iterator over the batches
    state/15/metrics.jsonl    the metrics up to this step
    state/15/sha256.json      size and SHA-256 of all files above, written last

A single process writes and hashes a checkpoint in the background while the run goes on.  Several
processes wait for it, since they must agree that it is whole.

A checkpoint is restored only if every hash holds, since a flipped bit changes numbers and raises no
error.  A broken checkpoint is moved to `broken/`, and the run goes on from the newest whole one.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import TypeVar, cast

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from specjax.parallel import leader
from specjax.training.mesh import together
from specjax.training.record import METRICS, write
from specjax.training.shards import digest
from specjax.types import Json

_HASHES, _DATA = "sha256.json", "data.json"
_KEPT = 3
_NONE = -1
StateT = TypeVar("StateT", bound=Mapping[str, object])


class Checkpoints:
    """Saves the states of a run in `out`, and restores the newest whole one.

    Attributes:
      step: the step of that checkpoint when the run was begun or resumed; None if there is none.
      metrics: its copy of the metrics; None if there is none.
      data: its state of the iterator over the batches; None if an earlier version wrote it.

    Raises:
      ValueError: there are checkpoints, but none of them is whole.
    """

    def __init__(self, out: pathlib.Path) -> None:
        self._folder, self._out = out / "state", out
        step = _whole(out) if leader() else _NONE
        if jax.process_count() > 1:
            step = int(multihost_utils.broadcast_one_to_all(np.int32(step)))
        self.step = None if step == _NONE else step
        copy = self._folder / str(step) / METRICS
        self.metrics = copy if copy.exists() else None
        data = copy.with_name(_DATA)
        self.data: dict[str, Json] | None = json.loads(data.read_text()) if data.exists() else None
        self._beside = jax.process_count() == 1
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=_KEPT, enable_async_checkpointing=self._beside
            ),
        )
        self._worker = concurrent.futures.ThreadPoolExecutor(1)
        self._broken = False
        self._writing: tuple[int, concurrent.futures.Future[None]] | None = None

    def restore(self, state: StateT) -> StateT:
        """Returns the checkpoint of `step`, laid out as `state`.

        Raises:
          ValueError: Orbax cannot read it, although its files have not changed.
        """
        try:
            return cast(
                StateT, dict(self._manager.restore(self.step, args=ocp.args.StandardRestore(state)))
            )
        except Exception as error:  # Orbax, tensorstore and the system raise different types
            raise ValueError(
                f"{self._folder / str(self.step)} cannot be restored: {error}\n"
                "delete this folder to go on from an earlier checkpoint, or choose another --out"
            ) from error

    def save(
        self, step: int, state: Mapping[str, object], data: dict[str, Json] | None = None
    ) -> None:
        """Writes a checkpoint with the state of the data and a copy of the metrics, and its hashes.

        The state may be donated as soon as this returns: Orbax then holds NumPy arrays of it, and
        JAX overwrites no memory of which there is one.

        Raises:
          OSError: it, or the one before, could not be written; earlier checkpoints are intact.
        """
        self.wait()
        path = self._out / METRICS
        beside = {_DATA: json.dumps(data).encode()} if data is not None else {}
        if leader() and path.exists():
            beside[METRICS] = path.read_bytes()
        last = self.last
        try:
            self._manager.save(step, args=ocp.args.StandardSave(state))
        except Exception as error:  # tensorstore and the operating system raise different types
            raise self._failed(step, last, error) from error
        finished = self._worker.submit(self._finish, step, beside)
        self._writing = step, finished
        if not self._beside:
            self.wait()
            together(f"hashed step {step}")

    def wait(self) -> None:
        """Waits until the last checkpoint is written.  Raises OSError if it could not be."""
        if self._writing is None:
            return
        (step, finished), self._writing = self._writing, None
        try:
            finished.result()
        except Exception as error:  # tensorstore and the operating system raise different types
            whole = [number for number in saved_steps(self._out) if number != step]
            raise self._failed(step, max(whole, default=None), error) from error

    def _finish(self, step: int, beside: dict[str, bytes]) -> None:
        self._manager.wait_until_finished()
        if leader():
            folder = self._folder / str(step)
            for name, content in beside.items():
                (folder / name).write_bytes(content)
            write(folder / _HASHES, json.dumps({"files": _facts(folder)}, indent=1) + "\n")

    def _failed(self, step: int, last: int | None, error: Exception) -> OSError:
        self._broken = True
        return OSError(
            f"the checkpoint of step {step} could not be written to {self._folder}: {error}\n"
            f"The last good one (step {last}) is intact: free some space, "
            "and resume with the same command"
        )

    @property
    def last(self) -> int | None:
        """The step of the newest checkpoint."""
        return self._manager.latest_step()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._worker.shutdown()
            # Orbax would raise the error of a write once more, which `wait` has raised.
            with contextlib.suppress(*([Exception] if self._broken else [])):
                self._manager.close()


def saved_steps(out: pathlib.Path) -> list[int]:
    """Returns the steps of the checkpoints in the folder of a run, in ascending order."""
    # Orbax renames a checkpoint to its number when it is complete.
    return sorted(int(path.name) for path in (out / "state").glob("[0-9]*") if path.name.isdigit())


def _whole(out: pathlib.Path) -> int:
    """Returns the newest whole checkpoint, or `_NONE`; broken newer ones are put away."""
    folder, steps = out / "state", saved_steps(out)[::-1]
    hashed = [step for step in steps if (folder / str(step) / _HASHES).exists()]
    if not hashed and steps:
        print(
            f"{folder / str(steps[0])} has no {_HASHES}: it was killed before its files were "
            "hashed, or an earlier version wrote it, so they cannot be verified",
            flush=True,
        )
        return steps[0]
    faults: dict[int, str] = {}
    for step in hashed:
        if fault := _fault(folder / str(step)):
            faults[step] = fault
            continue
        for newer in (number for number in steps if number > step):
            _put_away(out, newer, faults.get(newer), step)
        return step
    if not faults:
        return _NONE
    raise ValueError(
        f"no checkpoint in {folder} is whole:\n  "
        + "\n  ".join(faults.values())
        + f"\nbring these files back from a copy, or delete {folder} to begin again"
    )


def _put_away(out: pathlib.Path, step: int, fault: str | None, whole: int) -> None:
    """Makes room for the checkpoint of a step, which the run will write again."""
    folder, aside = out / "state" / str(step), out / "broken" / str(step)
    if fault is None:
        print(f"{folder} has no {_HASHES}: the run was killed while it wrote it", flush=True)
        shutil.rmtree(folder)
        return
    shutil.rmtree(aside, ignore_errors=True)
    aside.parent.mkdir(exist_ok=True)
    folder.rename(aside)
    print(
        f"the checkpoint of step {step} is broken: {fault}.  It is now in {aside}, and the run "
        f"goes on from step {whole}",
        flush=True,
    )


def _facts(folder: pathlib.Path) -> dict[str, dict[str, object]]:
    """Returns size and SHA-256 of each file below a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != _HASHES)
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest(path)}
        for path in files
    }


def _fault(folder: pathlib.Path) -> str | None:
    """Describes the fault of a checkpoint, with the name of the file; None if it is whole."""
    path = folder / _HASHES
    try:
        files = json.loads(path.read_bytes())["files"]
        wanted = {folder / name: (fact["bytes"], fact["sha256"]) for name, fact in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{path} cannot be read ({error!r})"
    for file, (size, sha256) in wanted.items():
        if not file.is_file():
            return f"{file} is missing, and {_HASHES} names it"
        if file.stat().st_size != size:
            return f"{file} has {file.stat().st_size} bytes instead of the {size} in {_HASHES}"
        if digest(file) != sha256:
            return f"the SHA-256 of {file} is not the one in {_HASHES}"
    return None
