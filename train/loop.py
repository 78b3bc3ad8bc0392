"""The one training loop.  A job says what to learn and from what; the loop steps, saves, resumes and reports.

    Job.batch(step) -> arrays --> jitted update (loss, gradient, Optax) --> every so often: evaluate, save

What a step does depends on the options and the step number alone, so a run that was killed and resumed goes through
the same states as one that was not.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import signal
import time
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from jax import Array
from tqdm import tqdm

from train.options import option, write

_LOG_EVERY = 50


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """What every job takes."""

    out: str = option("runs/run", "folder of the run: checkpoints, metrics, options, and the model at its end")
    steps: int = option(1000, "optimizer steps")
    batch_size: int = option(4, "sequences per step")
    sequence_length: int = option(512, "tokens per sequence")
    learning_rate: float = option(2e-3, "peak learning rate of AdamW")
    warmup_steps: int = option(200, "steps of linear warm-up")
    decay_fraction: float = option(0.2, "last part of the run in which the learning rate falls linearly to zero")
    weight_decay: float = option(0.1, "of AdamW, on matrices only")
    clip: float = option(1.0, "largest norm of the gradient")
    seed: int = option(0, "of initialisation, data order and sampling")
    eval_every: int = option(500, "steps between evaluations")
    save_every: int = option(500, "steps between checkpoints; the last three are kept")
    stop_at: int = option(0, "stop and save after this step of `steps`, to go on later; 0: run to the end")

    def __post_init__(self):
        for name in ("steps", "batch_size", "sequence_length", "eval_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.decay_fraction <= 1:
            raise ValueError(f"--decay-fraction is {self.decay_fraction}; it must lie in [0, 1]")


class Job(Protocol):
    """What a training job brings to the loop.  Hashed by identity: it is a static argument of the update."""

    @property
    def frozen(self) -> Any:
        """Arrays that the loss reads and nobody trains: a target's parameters, or None."""
        ...

    def init(self) -> Any:
        """Fresh trainable parameters."""
        ...

    def batch(self, step: int) -> Any:
        """The data of a step: a pytree of arrays, a function of the step alone."""
        ...

    def loss(self, params: Any, frozen: Any, batch: Any) -> tuple[Array, dict[str, Array]]:
        """Scalar loss and further metrics; traced once."""
        ...

    def evaluate(self, params: Any) -> dict[str, float]: ...

    def export(self, params: Any, folder: pathlib.Path) -> None:
        """Write the finished model."""
        ...


def make_schedule(options: LoopOptions) -> optax.Schedule:
    """Warm-up, constant, linear decay ("WSD", Hu et al. 2024, arXiv 2404.06395, equation 1).

    Until the decay starts the rate does not depend on `steps`, so a run can be resumed with more of them.
    """
    decay = max(1, round(options.steps * options.decay_fraction))
    rate = options.learning_rate
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, rate, options.warmup_steps),
            optax.constant_schedule(rate),
            optax.linear_schedule(rate, 0.0, decay),
        ],
        [options.warmup_steps, options.steps - decay],
    )


def make_optimizer(options: LoopOptions) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101) after clipping by the global norm."""
    return optax.chain(
        optax.clip_by_global_norm(options.clip),
        optax.adamw(
            make_schedule(options),
            b2=0.95,
            weight_decay=options.weight_decay,
            mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        ),
    )


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def update(
    job: Job, optimizer: optax.GradientTransformation, state: dict, frozen: Any, batch: Any
) -> tuple[dict, dict]:
    """One step: state and metrics."""
    (loss, metrics), grads = jax.value_and_grad(job.loss, has_aux=True)(state["params"], frozen, batch)
    changes, optimizer_state = optimizer.update(grads, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], changes)
    metrics = {"loss": loss, "grad_norm": optax.global_norm(grads), **metrics}
    return {"params": params, "optimizer": optimizer_state, "step": state["step"] + 1}, metrics


class Metrics:
    """`metrics.jsonl`: a JSON object a line.  Lines past the step that a run resumes from are dropped."""

    def __init__(self, path: pathlib.Path, step: int):
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        path.write_text("".join(line + "\n" for line in kept))
        self._path = path

    def write(self, step: int, values: dict[str, Any]) -> None:
        rounded = {name: round(float(value), 6) for name, value in values.items()}
        with open(self._path, "a") as file:
            file.write(json.dumps({"step": step, **rounded}) + "\n")


def fit(job: Job, options: LoopOptions) -> dict[str, float]:
    """Run a job to its end, or resume it.  Returns the last evaluation.

    Ctrl-C and SIGTERM finish the step, save, and stop: the same command goes on from there.
    """
    out = pathlib.Path(options.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    write(options, out / "options.json")
    optimizer = make_optimizer(options)
    manager = ocp.CheckpointManager(
        out / "state", options=ocp.CheckpointManagerOptions(max_to_keep=3, enable_async_checkpointing=False)
    )
    params = job.init()
    state = {"params": params, "optimizer": optimizer.init(params), "step": jnp.int32(0)}
    if manager.latest_step() is not None:
        state = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(state))
        print(f"resumed {out} at step {int(state['step'])} of {options.steps}", flush=True)
    step = int(state["step"])
    metrics = Metrics(out / "metrics.jsonl", step)
    stop = options.stop_at or options.steps

    interrupted = []
    previous = {s: signal.signal(s, lambda *_: interrupted.append(1)) for s in (signal.SIGINT, signal.SIGTERM)}
    bar = tqdm(total=options.steps, initial=step, unit="step", disable=None)
    report: dict[str, float] = {}
    started, tokens = time.perf_counter(), 0

    def check_finite():
        if not jnp.isfinite(values["loss"]):
            raise FloatingPointError(
                f"the loss is {values['loss']} at step {step}; {out}/state holds the last good checkpoint "
                f"(step {manager.latest_step()}): resume with a lower --learning-rate"
            )

    try:
        ending = False
        while step < stop and not ending:
            state, values = update(job, optimizer, state, job.frozen, job.batch(step))
            step += 1
            bar.update()
            tokens += options.batch_size * options.sequence_length
            if step % _LOG_EVERY == 0 or step == options.steps:
                check_finite()
                rate = tokens / (time.perf_counter() - started)
                metrics.write(step, {**values, "tokens_per_second": rate})
                bar.set_postfix(loss=f"{values['loss']:.3f}", tokens_per_second=f"{rate:.0f}")
                started, tokens = time.perf_counter(), 0
            if step % options.eval_every == 0 or step == options.steps:
                report = job.evaluate(state["params"])
                metrics.write(step, report)
                bar.write(f"step {step}: " + "  ".join(f"{k} {v:.4f}" for k, v in report.items()))
                started, tokens = time.perf_counter(), 0
            # Read once: a signal that comes after this line ends the next step, not this one unsaved.
            ending = bool(interrupted)
            if step % options.save_every == 0 or step == stop or ending:
                check_finite()
                manager.save(step, args=ocp.args.StandardSave(state))
    finally:
        bar.close()
        manager.close()
        for number, handler in previous.items():
            signal.signal(number, handler)
    if step < options.steps:
        print(f"stopped and saved at step {step} of {options.steps}; the same command resumes", flush=True)
    else:
        job.export(state["params"], out / "model")
        print(f"wrote {out / 'model'}", flush=True)
    return report
