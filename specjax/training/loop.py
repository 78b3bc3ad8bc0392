"""The training loop.  A job has the data and the loss; the loop steps, saves and reports.

    Job.batch(step) -> jitted update (loss, gradient, Optax) -> at intervals: log, evaluate, save

A step depends only on the options and the step number, so a run that was killed and resumed goes
through the same states as an uninterrupted run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from jax import Array
from jax.sharding import Mesh

from specjax.options.fields import SEED, count, option
from specjax.parallel import leader, mesh_of, row_parts
from specjax.training.checkpoints import Checkpoints
from specjax.training.lock import alone
from specjax.training.mesh import (
    Agreement,
    MeshOptions,
    lay_batch,
    lay_state,
    mesh_of_sizes,
    mesh_sizes,
    together,
)
from specjax.training.optimizer import (
    OptimizerOptions,
    State,
    averaged,
    make_optimizer,
    phases,
    start,
    update,
)
from specjax.training.optimizers import decays
from specjax.training.progress import Progress
from specjax.training.record import METRICS, RUN, Metrics, describe, last_evaluation
from specjax.training.trees import Batch, Row, Tree
from specjax.types import Json

if TYPE_CHECKING:
    import grain


@dataclasses.dataclass(frozen=True)
class LoopOptions(OptimizerOptions, MeshOptions):
    """The options of every job that trains."""

    group = "run"

    out: str = option(
        "runs/run", "folder of the run: checkpoints, metrics and the final model", free=True
    )
    sequence_length: int = count(512, "tokens per sequence")
    seed: int = option(0, "seed of initialisation, data order and sampling", SEED)
    log_every: int = count(50, "steps between lines of metrics")
    eval_every: int = count(500, "steps between evaluations")
    save_every: int = count(500, "steps between checkpoints; the last three are kept", free=True)
    patience: int = count(
        0, "stop after this many evaluations without improvement; 0: never", 0, free=True
    )
    stop_at: int = count(
        0, "save and stop after this step, to be resumed later; 0: run to the end", 0, free=True
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


def mesh_of_run(options: LoopOptions) -> Mesh | None:
    """Returns the mesh of the options; None for a single device."""
    sizes = mesh_sizes(options)
    mesh = mesh_of_sizes(sizes)
    rows, parts = options.batch_size // options.accumulate, row_parts(mesh)
    if rows % parts:
        raise ValueError(
            f"--batch-size {options.batch_size} read in --accumulate {options.accumulate} parts "
            f"is {rows} sequences at a time, which {parts} devices along data and fsdp do not "
            "divide: take a batch of "
            f"{-(-rows // parts) * parts * options.accumulate}, or another --mesh"
        )
    return mesh


class Job(Protocol):
    """A training job, as the loop uses it.

    A job is a static argument of the update, so it is hashable, and jobs that are equal share a
    program.  It may also have these attributes:

      inputs: hashes of its inputs by name, which must not change in a resumed run.
      goal: a method that returns a number from the report of an evaluation.  Greater is better: the
        best model is kept, and `--patience` counts from it.
      facts: further entries of `run.json` by name, such as the folders of the models.
      rates: factors on the learning rate (see `optimizer.make_optimizer`), or None.
    """

    @property
    def frozen(self) -> Tree:
        """The arrays that the loss reads but does not train, such as a target's parameters."""
        ...

    def init(self) -> Tree:
        """Returns new trainable parameters.  If they are on a mesh, the run uses that mesh."""
        ...

    def batch(self, step: int) -> Row:
        """Returns the data of a step, which depends only on it.  Axis 0 of each leaf is the row."""
        ...

    def loss(self, params: Tree, frozen: Tree, batch: Batch) -> tuple[Array, dict[str, Array]]:
        """Returns the loss and further metrics; `optimizer.gradient` reads the metric `weight`."""
        ...

    def evaluate(self, params: Tree) -> dict[str, float]: ...

    def export(self, params: Tree, folder: pathlib.Path) -> None:
        """Writes the finished model."""
        ...

    @property
    def tokenizer(self) -> tokenizers.Tokenizer | None:
        """The tokenizer that decodes the tokens of `show`."""
        ...

    def show(self, batch: Row) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens [B, T + 1] of a batch, and a mask [B, T] of the learned ones."""
        ...


def fit(
    job: Job, options: LoopOptions, optimizer: optax.GradientTransformation | None = None
) -> dict[str, float]:
    """Runs a job to its end, or resumes it.

    Without an `optimizer` of the caller's own, the options describe one.

    Ctrl-C, SIGTERM, SIGHUP and a closed stdout finish the step, save and stop.  The same command
    then resumes the run, also on another mesh or with another number of processes.  With several
    processes only the first one writes files, except that each writes its own shard of the
    checkpoints.

    Returns:
      The report of the last evaluation.  A call that evaluates nothing itself, because the run had
      already ended, reads it from `metrics.jsonl`.

    Raises:
      ValueError: the folder holds a run with other options or inputs, another run is writing to it,
        or a file of the run is damaged and nothing can replace it.
      FloatingPointError: the loss is not finite.
      OSError: a checkpoint could not be written, and earlier ones are intact; or stdout has closed.
    """
    with alone(options.out, writes=not options.show_mask):
        return _fit(job, options, optimizer)


def _fit(
    job: Job, options: LoopOptions, optimizer: optax.GradientTransformation | None
) -> dict[str, float]:
    out = pathlib.Path(options.out).absolute()
    if options.show_mask:
        print(show_mask(job))
        return {}
    out.mkdir(parents=True, exist_ok=True)
    if options.curves:
        from specjax.training.curves import pyplot  # few runs need it

        pyplot()  # fails now, and not at the end of the run, if matplotlib is missing
    checkpoints = Checkpoints(out)
    resumed = checkpoints.step is not None
    if optimizer is None:
        optimizer = make_optimizer(options, getattr(job, "rates", None))
        if leader() and options.weight_decay and not decays(options.optimizer):
            print(f"note: {options.optimizer} of optax has no weight decay on matrices", flush=True)
    # `best` is the greatest value of the goal so far; `since` counts the evaluations after it.
    params = job.init()
    mesh = mesh_of(params)
    state: State = {
        **start(optimizer, options, params),
        "best": jnp.float32(-jnp.inf),
        "since": jnp.int32(0),
    }
    state = lay_state(state, mesh)
    inputs, facts = getattr(job, "inputs", {}), getattr(job, "facts", {})
    describe(out / RUN, options, inputs, state, resumed, facts, options.accept_changes)
    if resumed:
        state = checkpoints.restore(state)
        print(f"resumed {out} at step {int(state['step'])} of {options.steps}", flush=True)
    best, since = float(state.pop("best")), int(state.pop("since"))
    step = int(state["step"])
    report = last_evaluation(checkpoints.metrics or out / METRICS, step) if resumed else {}
    metrics = Metrics(out / METRICS, step, options.tensorboard, checkpoints.metrics)
    stop = min(options.stop_at or options.steps, options.steps)
    warmup = phases(options)[0]
    if leader() and warmup < options.warmup:
        asked = f"{options.warmup} steps of warm-up do not fit into --steps {options.steps}"
        print(f"{asked} before the rate falls: the warm-up takes {warmup}", flush=True)
    progress = Progress(options.steps, step)
    rank: Callable[[dict[str, float]], float] | None = getattr(job, "goal", None)
    values: dict[str, Array] = {}
    began, tokens = time.perf_counter(), 0

    def patient() -> bool:
        return not options.patience or since < options.patience

    def check(number: int, values: Mapping[str, Array]) -> None:
        if values and not np.isfinite([values["loss"], values["grad_norm"]]).all():
            if leader():
                np.savez(out / "bad_batch.npz", **cast(dict[str, Any], job.batch(number - 1)))
            raise FloatingPointError(
                f"the loss is {values['loss']} and its gradient's norm {values['grad_norm']} at "
                f"step {number}, on batch {number - 1} (kept in {out / 'bad_batch.npz'}); "
                f"{out / 'state'} holds the last good checkpoint (step {checkpoints.last}): "
                "resume it with a lower --learning-rate and --accept-changes"
            )

    def save() -> None:
        record = {"best": np.array(best, np.float32), "since": np.array(since, np.int32)}
        checkpoints.save(step, {**state, **record}, batches.get_state())

    agreement = Agreement(mesh)
    with (
        _signals() as interrupted,
        contextlib.closing(checkpoints),
        contextlib.closing(metrics),
        contextlib.closing(progress),
        contextlib.closing(_batches(job, max(stop, step), checkpoints.data, step)) as batches,
    ):
        ending = False
        while step < stop and patient() and not ending:
            batch = lay_batch(next(batches), mesh)
            before, (state, values) = (
                values,
                update(job, optimizer, options, state, job.frozen, batch),
            )
            check(step, before)  # the previous step's values: the host does not wait for this step
            step += 1
            shown: dict[str, str] = {}
            tokens += options.batch_size * options.sequence_length
            if step % options.log_every == 0 or step == options.steps:
                check(step, values)
                rate = tokens / (time.perf_counter() - began)
                metrics.write(step, {**values, "tokens_per_second": rate})
                shown["loss"] = f"{values['loss']:.3f}"
                if "learning_rate" in values:
                    shown["learning_rate"] = f"{values['learning_rate']:.2e}"
                shown["tokens_per_second"] = f"{rate:.0f}"
                began, tokens = time.perf_counter(), 0
            progress.advance(**shown)
            if step % options.eval_every == 0 or step == options.steps:
                check(step, values)
                report = job.evaluate(averaged(state))
                metrics.write(step, report)
                figures = "  ".join(f"{name} {value:.4f}" for name, value in report.items())
                progress.say(f"step {step}: {figures}")
                if rank is not None:
                    goal = float(np.float32(rank(report)))
                    best, since = (goal, 0) if goal > best else (best, since + 1)
                    if since == 0:
                        _replace(out / "best", functools.partial(job.export, averaged(state)))
                began, tokens = time.perf_counter(), 0
            # Ask once per step: a later signal must not end the loop before the step is saved.
            ending = agreement.ask(bool(interrupted) or progress.closed is not None)
            if step % options.save_every == 0 or step == stop or ending or not patient():
                check(step, values)
                save()
    if step < options.steps and patient():
        if progress.closed is not None:
            raise OSError(
                f"the output has closed ({progress.closed}); saved at step {step} of "
                f"{options.steps}, and the same command resumes"
            )
        print(
            f"stopped and saved at step {step} of {options.steps}; the same command resumes",
            flush=True,
        )
        return report
    if step < options.steps:
        print(
            f"stopped at step {step} of {options.steps}: {since} evaluations without improvement",
            flush=True,
        )
    _replace(out / "model", functools.partial(job.export, averaged(state)))
    print(
        f"wrote {out / 'model'}" + (f"; the best one is {out / 'best'}" if since else ""),
        flush=True,
    )
    if options.curves and leader():
        from specjax.training.curves import plot_curves

        print(f"wrote {plot_curves(out)}", flush=True)
    return report


def show_mask(job: Job) -> str:
    """Returns the text of the first batch of a job, with the learned tokens in colour."""
    from specjax.training.masks import paint  # few runs need it

    tokens, learned = job.show(job.batch(0))
    assert job.tokenizer is not None
    # The first token of a sequence is never a label.
    masks = np.pad(np.asarray(learned, bool), ((0, 0), (1, 0)))
    return "\n".join(
        paint(row, mask, job.tokenizer) for row, mask in zip(np.asarray(tokens), masks, strict=True)
    )


def _batches(
    job: Job, stop: int, state: dict[str, Json] | None, step: int
) -> grain.DatasetIterator[Row]:
    """Returns an iterator over the batches of the steps before `stop`.

    A thread makes two batches ahead while the device computes.  `state` is that of a checkpoint's
    iterator; without it, as in checkpoints of earlier versions, the batches begin at `step`.
    """
    import grain

    steps = grain.MapDataset.range(stop).map(job.batch)
    batches = iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))
    batches.set_state(state or {"next_index": step})
    return batches


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Yields a list of the signals SIGINT, SIGTERM and SIGHUP that the process has received."""
    received: list[int] = []
    asked = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup leaves it
        asked.append(signal.SIGHUP)
    previous = {
        number: signal.signal(number, lambda received_now, _: received.append(received_now))
        for number in asked
    }
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _replace(folder: pathlib.Path, write: Callable[[pathlib.Path], None]) -> None:
    """Replaces `folder` by the result of `write(folder)`; it never has a partial result."""
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
