"""Schedule, AdamW, accumulation and averaging: one update of a job's parameters, a function of state and batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from specjax.parallel import hold, layout
from specjax.training.mesh import gathered
from specjax.training.options import Options, above, at_least, option, within

SCHEDULES = ("wsd", "cosine")


@dataclasses.dataclass(frozen=True)
class OptimizerOptions(Options):
    """How parameters follow gradients."""

    steps: int = option(1000, "optimizer steps", free=True)
    batch_size: int = option(4, "sequences per step")
    accumulate: int = option(
        1, "parts that a batch is read in, one after the other, to need less memory"
    )
    learning_rate: float = option(2e-3, "peak learning rate of AdamW")
    schedule: str = option(
        "wsd", "of the learning rate: constant and at the end linear, or cosine", choices=SCHEDULES
    )
    warmup_steps: int = option(200, "steps of linear warm-up; fewer in a run that is too short")
    warmup_fraction: float = option(
        0.0, "part of the run that is warm-up, instead; 0: so many steps"
    )
    decay_fraction: float = option(
        0.2, "last part of the run, which no warm-up takes; a wsd rate falls linearly to zero in it"
    )
    weight_decay: float = option(0.1, "of AdamW, on matrices only")
    clip: float = option(1.0, "largest norm of the gradient")
    ema: float = option(
        0.0,
        "decay of a moving average of the parameters, which is then evaluated and kept; 0: none",
    )

    def __post_init__(self):
        super().__post_init__()
        at_least(self, 1, "steps", "batch_size", "accumulate")
        at_least(self, 0, "warmup_steps", "weight_decay")
        above(self, 0, "learning_rate")
        within(self, 0, 1, "decay_fraction", "warmup_fraction")
        if not self.clip > 0:
            raise ValueError(f"--clip is {self.clip}; it must be greater than 0 (inf: no clipping)")
        if not 0 <= self.ema < 1:
            raise ValueError(f"--ema is {self.ema}; it must lie in [0, 1): 1 averages nothing")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"--accumulate is {self.accumulate}; it must divide --batch-size, which is {self.batch_size}"
            )

    @property
    def warmup(self) -> int:
        """Steps of warm-up that are asked for."""
        by_fraction = round(self.steps * self.warmup_fraction)
        return by_fraction if self.warmup_fraction else self.warmup_steps


def phases(options: OptimizerOptions) -> tuple[int, int]:
    """Steps of warm-up and of the decay at the end of a wsd run.

    They never overlap.  A warm-up that does not fit gives way to the decay, but not beyond half of
    the run, and the decay has what is left.
    """
    steps = options.steps
    decay = max(1, round(steps * options.decay_fraction))
    warmup = min(options.warmup, max(steps - decay, steps // 2))
    return warmup, min(decay, steps - warmup)


def make_schedule(options: OptimizerOptions) -> optax.Schedule:
    """The learning rate of each step, from 0: warm-up, then cosine, or constant and then linear
    ("WSD", Hu et al. 2024, arXiv 2404.06395, equation 1).  It is 0 behind the last step.

    Where warm-up and decay fit, a wsd rate does not depend on `steps` until the decay starts, so a
    run can be resumed with more of them.
    """
    rate, (warmup, decay) = options.learning_rate, phases(options)
    if options.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(0.0, rate, warmup, options.steps)
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, rate, warmup),
            optax.constant_schedule(rate),
            optax.linear_schedule(rate, 0, decay),
        ],
        [warmup, options.steps - decay],
    )


def make_optimizer(
    options: OptimizerOptions, rates: Mapping[str, float] | None = None
) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101) after clipping by the global norm.

    With `rates`, parameters are a dict, and those below each name learn at so many times the rate.
    """
    return optax.chain(
        optax.clip_by_global_norm(options.clip),
        optax.adamw(
            make_schedule(options),
            b2=0.95,
            weight_decay=options.weight_decay,
            mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        ),
        *([] if rates is None else [_times(rates)]),
    )


def _times(rates: Mapping[str, float]) -> optax.GradientTransformation:
    def scale(updates, _):
        return {
            name: jax.tree.map(lambda u, rate=rates[name]: rate * u, branch)
            for name, branch in updates.items()
        }

    return optax.stateless(scale)


def start(
    optimizer: optax.GradientTransformation, options: OptimizerOptions, params: Any
) -> dict[str, Any]:
    """The state of step 0."""
    state = {"params": params, "optimizer": optimizer.init(params), "step": jnp.int32(0)}
    return state | ({"ema": jax.tree.map(jnp.copy, params)} if options.ema else {})


def averaged(state: dict[str, Any]) -> Any:
    """The parameters to use: their moving average, where there is one."""
    return state.get("ema", state["params"])


def update(
    job: Any,
    optimizer: optax.GradientTransformation,
    options: OptimizerOptions,
    state: dict,
    frozen: Any,
    batch: Any,
) -> tuple[dict, dict]:
    """One step of a `loop.Job`: state and metrics.  The state is donated, and lies afterwards as it did."""
    read = gathered(layout(state["params"])), gathered(layout(frozen))
    return _update(job, optimizer, options, layout(state), read, state, frozen, batch)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4), donate_argnums=5)
def _update(job, optimizer, options, layout, read, state, frozen, batch):
    def loss_of(params, frozen, batch):
        return job.loss(hold(params, read[0]), hold(frozen, read[1]), batch)

    loss, metrics, grads = gradient(loss_of, options.accumulate, state["params"], frozen, batch)
    changes, optimizer_state = optimizer.update(grads, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], changes)
    after = {"params": params, "optimizer": optimizer_state, "step": state["step"] + 1}
    if options.ema:
        after["ema"] = optax.incremental_update(params, state["ema"], 1 - options.ema)
    rate = {"learning_rate": make_schedule(options)(state["step"])}
    metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), **rate, **metrics}
    return hold(after, layout), metrics


def gradient(
    loss: Any, parts: int, params: Any, frozen: Any, batch: Any
) -> tuple[Array, dict[str, Array], Any]:
    """Loss, metrics and gradient of a batch that is read in `parts`, cut along axis 0 of every leaf.

    A loss that is a mean over what its batch holds says of how much, as the metric `weight`: the parts then count as
    they do in the whole.
    """
    differentiate = jax.value_and_grad(loss, has_aux=True)

    def read(part):
        (value, metrics), grads = differentiate(params, frozen, part)
        metrics = {"loss": value, **metrics}
        weight = jnp.asarray(metrics.pop("weight", 1.0), jnp.float32)
        return weight, metrics, grads

    if parts == 1:
        _, metrics, grads = read(batch)
        return metrics.pop("loss"), metrics, grads

    def add(total, part):
        weight, metrics, grads = read(part)
        return jax.tree.map(lambda t, g: t + weight * g, total, grads), (weight, metrics)

    # Part i has the rows i, i + parts, ...: on a mesh, of every device as many as of another.
    batch = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)
    zeros = jax.tree.map(jnp.zeros_like, params)
    total, (weights, metrics) = jax.lax.scan(add, zeros, batch)
    whole = jnp.maximum(weights.sum(), 1e-9)
    metrics = {name: (weights * values).sum() / whole for name, values in metrics.items()}
    return metrics.pop("loss"), metrics, jax.tree.map(lambda t: t / whole, total)
