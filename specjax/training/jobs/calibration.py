"""`--loss auto` of `train.distill`: a short training with each loss, and the one with the best tau.

    OUT/auto/LOSS     the training with a loss, until the choice is made
    OUT/auto.json     tau of each loss on held-out prompts, and the choice

All of them begin with the same parameters, seed and batches, and each has a schedule of its own,
with warm-up and decay.  The run then begins anew with the chosen loss, so its model has the bytes
of a run that named this loss.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from specjax.files import read_json
from specjax.parallel import leader
from specjax.training.loop import Job, LoopOptions, fit
from specjax.training.mesh import together
from specjax.training.record import changed_options, write
from specjax.types import Json

FILE = "auto.json"

Results = dict[str, dict[str, float | str]]
"""tau, tau_low and tau_high of each loss, or `failure` with a message."""


T = TypeVar("T", bound="Trainable")


class Trainable(Job, Protocol):
    """A job whose loss and other options can be changed."""

    @property
    def options(self) -> LoopOptions: ...

    def with_loss(self: T, loss: str, facts: Mapping[str, Json], **changes: object) -> T: ...


def calibrated(job: T, losses: Sequence[str], steps: int, prompts: int) -> T:
    """Returns the job with the loss of the best tau on held-out prompts, after `steps` steps.

    A finished training is not repeated, and an interrupted one resumes.
    """
    options, out = job.options, pathlib.Path(job.options.out)
    path, fixed, results = out / FILE, _fixed(options), Results()
    if path.exists():
        before = read_json(path)
        if not {"options", "steps", "losses"} <= set(before):
            raise ValueError(f"{path} is not what --loss auto writes: delete it to compare again")
        changes = changed_options(options, before["options"], fixed)
        if changes and not options.accept_changes:
            raise ValueError(
                f"{path} was written with other options:\n  "
                + "\n  ".join(changes)
                + "\nchoose another --out, or delete the file to compare the losses again"
            )
        steps, results = before["steps"], before["losses"]
    for loss in losses:
        if loss not in results:
            print(f"--loss auto: {steps} steps with {loss}", flush=True)
            results[loss] = _try(job, loss, steps, prompts, out / "auto" / loss)
            if leader():
                facts = {"options": fixed, "steps": steps, "losses": results}
                write(path, json.dumps(facts, indent=2) + "\n")
        print(f"--loss auto: {loss}: {_said(results[loss])}", flush=True)
    asked = {loss: results[loss] for loss in losses}
    taus = {loss: float(found["tau"]) for loss, found in asked.items() if "tau" in found}
    if not taus:
        raise ValueError(f"--loss auto: training failed with every loss; {path} has the messages")
    chosen = max(taus, key=lambda loss: taus[loss])
    print(f"--loss auto: the run goes on with --loss {chosen}", flush=True)
    if leader():
        shutil.rmtree(out / "auto", ignore_errors=True)
    together(f"chose {chosen}")
    return job.with_loss(chosen, {"auto": {"chosen": chosen, "losses": asked}})


def _try(
    job: Trainable, loss: str, steps: int, prompts: int, out: pathlib.Path
) -> dict[str, float | str]:
    short = {"out": str(out), "steps": steps, "eval_every": steps, "eval_prompts": prompts}
    whole = {"stop_at": 0, "patience": 0, "curves": False, "tensorboard": False}
    trial = job.with_loss(loss, {}, **short, **whole)
    try:
        report = fit(trial, trial.options)
    except FloatingPointError as error:
        return {"failure": str(error)}
    return {name: report[name] for name in ("tau", "tau_low", "tau_high") if name in report}


def _fixed(options: LoopOptions) -> dict[str, Json]:
    """Returns the options and inputs on which a calibration depends."""
    fields = dataclasses.fields(options)
    free = {field.name for field in fields if field.metadata.get("free")} | {"auto_losses"}
    found = {f.name: vars(options)[f.name] for f in fields if f.name not in free}
    return json.loads(json.dumps(found))


def _said(result: dict[str, float | str]) -> str:
    if "failure" in result:
        return str(result["failure"])
    found = f"tau {result['tau']:.3f}"
    if "tau_low" not in result:  # one prompt has no interval
        return found
    return f"{found} ({result['tau_low']:.3f} to {result['tau_high']:.3f})"
