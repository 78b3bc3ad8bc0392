"""The one training loop.  A job says what to learn and from what; the loop steps, saves, resumes and reports.

    Job.batch(step) -> arrays --> jitted update (loss, gradient, Optax) --> every so often: evaluate, save

What a step does depends on the options and the step number alone, so a run that was killed and resumed goes through
the same states as one that was not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import shutil
import signal
import time
from collections.abc import Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import Array
from tqdm import tqdm

from specjax.parallel import leader, mesh_of
from specjax.training.curves import plot_curves, pyplot
from specjax.training.masks import paint
from specjax.training.mesh import Agreement, MeshOptions, lay_batch, lay_state, together
from specjax.training.optimizer import (
    OptimizerOptions,
    averaged,
    make_optimizer,
    phases,
    start,
    update,
)
from specjax.training.options import at_least, option, within
from specjax.training.record import Metrics, describe


@dataclasses.dataclass(frozen=True)
class LoopOptions(OptimizerOptions, MeshOptions):
    """What every job takes."""

    out: str = option(
        "runs/run", "folder of the run: checkpoints, metrics, and the model at its end", free=True
    )
    sequence_length: int = option(512, "tokens per sequence")
    seed: int = option(0, "of initialisation, data order and sampling")
    log_every: int = option(50, "steps between lines of metrics")
    eval_every: int = option(500, "steps between evaluations")
    save_every: int = option(500, "steps between checkpoints; the last three are kept", free=True)
    patience: int = option(
        0, "stop after so many evaluations without a better one; 0: never", free=True
    )
    stop_at: int = option(
        0, "stop and save after this step of `steps`, to go on later; 0: run to the end", free=True
    )
    tensorboard: bool = option(
        False, "write TensorBoard events too (needs tensorboardX)", free=True
    )
    curves: bool = option(False, "draw the metrics at the end (needs matplotlib)", free=True)
    show_mask: bool = option(
        False, "print in colour what of a batch is learned, and end", free=True
    )
    accept_changes: bool = option(
        False, "resume although options, text, tokenizer or target have changed", free=True
    )

    def __post_init__(self):
        super().__post_init__()
        at_least(self, 1, "sequence_length", "log_every", "eval_every", "save_every")
        at_least(self, 0, "patience", "stop_at")
        within(self, 0, 2**32 - 1, "seed")


class Job(Protocol):
    """What a training job brings to the loop.  Hashed by identity: it is a static argument of the update.

    `show(batch)` are the tokens [B, T + 1] of a batch and which [B, T] of those behind the first are learned;
    `tokenizer` writes them.

    It may also have `inputs`, hashes by name of what it reads, which a resumed run must find unchanged; and
    `goal(report)`, a number from an evaluation, the greater the better: the best model is kept, and patience asks it;
    and `rates`, by which parts of its parameters learn faster (`optimizer.make_optimizer`).
    """

    @property
    def frozen(self) -> Any:
        """Arrays that the loss reads and nobody trains: a target's parameters, or None."""
        ...

    def init(self) -> Any:
        """Fresh trainable parameters.  Where they lie on a mesh, the run is there."""
        ...

    def batch(self, step: int) -> Any:
        """The data of a step: a pytree of arrays with the sequence as axis 0, a function of the step alone."""
        ...

    def loss(self, params: Any, frozen: Any, batch: Any) -> tuple[Array, dict[str, Array]]:
        """Scalar loss and further metrics (`optimizer.gradient` says what `weight` among them means); traced once."""
        ...

    def evaluate(self, params: Any) -> dict[str, float]: ...

    def export(self, params: Any, folder: pathlib.Path) -> None:
        """Write the finished model."""
        ...

    @property
    def tokenizer(self) -> Any: ...

    def show(self, batch: Any) -> tuple[Any, Any]: ...


def fit(job: Job, options: LoopOptions) -> dict[str, float]:
    """Run a job to its end, or resume it.  Returns the last evaluation.

    Ctrl-C and SIGTERM finish the step, save, and stop: the same command goes on from there, also on another mesh and
    with another number of processes.  Of several processes only the first writes, but for their parts of checkpoints.

    Raises:
      ValueError: the folder holds a run of other options or inputs.
      FloatingPointError: the loss is not finite.
      OSError: a checkpoint could not be written; the ones before it are whole.
    """
    out = pathlib.Path(options.out).absolute()
    if options.show_mask:
        print(show_mask(job))
        return {}
    out.mkdir(parents=True, exist_ok=True)
    if options.curves:
        pyplot()  # now, rather than after hours
    manager = ocp.CheckpointManager(
        out / "state",
        options=ocp.CheckpointManagerOptions(max_to_keep=3, enable_async_checkpointing=False),
    )
    resumed = manager.latest_step() is not None
    optimizer = make_optimizer(options, getattr(job, "rates", None))
    # `best` is the goal's greatest value so far, `since` how many evaluations ago.
    params = job.init()
    mesh = mesh_of(params)
    state = {
        **start(optimizer, options, params),
        "best": jnp.float32(-jnp.inf),
        "since": jnp.int32(0),
    }
    state = lay_state(state, optimizer, mesh)
    describe(out / "run.json", options, getattr(job, "inputs", {}), state, resumed)
    if resumed:
        state = dict(manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(state)))
        print(f"resumed {out} at step {int(state['step'])} of {options.steps}", flush=True)
    best, since = float(state.pop("best")), int(state.pop("since"))
    step = int(state["step"])
    metrics = Metrics(out / "metrics.jsonl", step, options.tensorboard)
    stop = min(options.stop_at or options.steps, options.steps)
    warmup = phases(options)[0]
    if leader() and warmup < options.warmup:
        asked = f"{options.warmup} steps of warm-up do not fit into --steps {options.steps}"
        print(f"{asked} before the rate falls: it takes {warmup}", flush=True)
    bar = tqdm(total=options.steps, initial=step, unit="step", disable=None if leader() else True)
    report: dict[str, float] = {}
    began, tokens, values = time.perf_counter(), 0, {}

    def patient():
        return not options.patience or since < options.patience

    def check(number, values):
        if values and not np.isfinite([values["loss"], values["grad_norm"]]).all():
            if leader():
                np.savez(out / "bad_batch.npz", **_by_name(job.batch(number - 1)))
            raise FloatingPointError(
                f"the loss is {values['loss']} and its gradient's norm {values['grad_norm']} at step {number}, on "
                f"batch {number - 1} (kept in {out / 'bad_batch.npz'}); {out / 'state'} holds the last good checkpoint "
                f"(step {manager.latest_step()}): resume it with a lower --learning-rate and --accept-changes"
            )

    def save():
        record = {"best": np.array(best, np.float32), "since": np.array(since, np.int32)}
        try:
            manager.save(step, args=ocp.args.StandardSave({**state, **record}))
        except Exception as error:  # tensorstore and the operating system each have their own
            raise OSError(
                f"the checkpoint of step {step} could not be written to {out / 'state'}: {error}\nThe last good one "
                f"(step {manager.latest_step()}) is whole: make room, and the same command resumes"
            ) from error

    agreement = Agreement(mesh)
    with (
        _signals() as interrupted,
        contextlib.closing(manager),
        contextlib.closing(metrics),
        contextlib.closing(bar),
    ):
        ending = False
        while step < stop and patient() and not ending:
            batch = lay_batch(job.batch(step), mesh)
            before, (state, values) = (
                values,
                update(job, optimizer, options, state, job.frozen, batch),
            )
            check(step, before)  # of the step before: this one runs meanwhile
            step += 1
            bar.update()
            tokens += options.batch_size * options.sequence_length
            if step % options.log_every == 0 or step == options.steps:
                check(step, values)
                rate = tokens / (time.perf_counter() - began)
                metrics.write(step, {**values, "tokens_per_second": rate})
                bar.set_postfix(
                    loss=f"{values['loss']:.3f}",
                    learning_rate=f"{values['learning_rate']:.2e}",
                    tokens_per_second=f"{rate:.0f}",
                )
                began, tokens = time.perf_counter(), 0
            if step % options.eval_every == 0 or step == options.steps:
                check(step, values)
                report = job.evaluate(averaged(state))
                metrics.write(step, report)
                bar.write(f"step {step}: " + "  ".join(f"{k} {v:.4f}" for k, v in report.items()))
                if hasattr(job, "goal"):
                    found = float(np.float32(job.goal(report)))  # pyright: ignore[reportAttributeAccessIssue]
                    best, since = (found, 0) if found > best else (best, since + 1)
                    if since == 0:
                        _replace(out / "best", functools.partial(job.export, averaged(state)))
                began, tokens = time.perf_counter(), 0
            # Read once: a signal that comes after this line ends the next step, not this one unsaved.
            ending = agreement.ask(bool(interrupted))
            if step % options.save_every == 0 or step == stop or ending or not patient():
                check(step, values)
                save()
    if step < options.steps and patient():
        print(
            f"stopped and saved at step {step} of {options.steps}; the same command resumes",
            flush=True,
        )
        return report
    if step < options.steps:
        print(
            f"stopped at step {step} of {options.steps}: {since} evaluations without a better one",
            flush=True,
        )
    _replace(out / "model", functools.partial(job.export, averaged(state)))
    print(
        f"wrote {out / 'model'}" + (f"; the best one is {out / 'best'}" if since else ""),
        flush=True,
    )
    if options.curves and leader():
        print(f"wrote {plot_curves(out)}", flush=True)
    return report


def show_mask(job: Job) -> str:
    """The first batch of a job, what is learned of it in colour."""
    tokens, learned = job.show(job.batch(0))
    # What stands first in a sequence has nothing to be guessed from.
    masks = np.pad(np.asarray(learned, bool), ((0, 0), (1, 0)))
    return "\n".join(
        paint(row, mask, job.tokenizer) for row, mask in zip(np.asarray(tokens), masks, strict=True)
    )


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """A list that fills when somebody asks the process to end."""
    found: list[int] = []
    previous = {
        s: signal.signal(s, lambda number, _: found.append(number))
        for s in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield found
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _replace(folder: pathlib.Path, write: Any) -> None:
    """Put what `write(folder)` writes in the place of `folder`, which is whole before and after."""
    partial, old = (folder.with_name(f"{folder.name}.{suffix}") for suffix in ("partial", "old"))
    if leader():
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)
    write(partial)
    if leader():
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    together(f"wrote {folder}")


def _by_name(batch: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    return {jax.tree_util.keystr(path).strip("[]'") or "batch": leaf for path, leaf in leaves}
