"""The update of a job's parameters: schedule, optimizer, gradient accumulation and averaging."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import NamedSharding

from specjax.contract import Arrays
from specjax.parallel import constrain_like, layout
from specjax.training.loop_options import OptimizerOptions
from specjax.training.mesh import gathered
from specjax.training.optimizers import by_name, check_arguments, rates_of

Layout = tuple[NamedSharding | None, ...] | None
State = dict[str, Arrays]
Loss = Callable[[Arrays, Arrays, Arrays], tuple[Array, dict[str, Array]]]
"""`loss(params, frozen, batch)` returns a scalar and further metrics."""


def phases(options: OptimizerOptions) -> tuple[int, int]:
    """Returns the steps of warm-up, and of the decay at the end of a wsd run.

    They never overlap.  If both do not fit, the warm-up is shortened, but to no less than half of
    the run, and the decay takes the rest.
    """
    steps = options.steps
    decay = max(1, round(steps * options.decay_fraction))
    warmup = min(options.warmup, max(steps - decay, steps // 2))
    return warmup, min(decay, steps - warmup)


def make_schedule(options: OptimizerOptions) -> optax.Schedule:
    """Returns the learning rate of each step, counted from 0.

    After the warm-up it follows a cosine, or it is constant and then decays linearly ("WSD", Hu et
    al. 2024, arXiv 2404.06395, equation 1).  After the last step it is 0.

    If warm-up and decay fit, a wsd rate does not depend on `steps` until the decay starts, so a run
    can be resumed with more steps.
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
    """Returns the optimizer of the options, after clipping by the global norm.

    By default it is AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101).  With `rates`, the
    parameters are a dict, and `rates` has a factor on the learning rate for each of its keys.
    """
    arguments = check_arguments(options.optimizer, options.optimizer_args)
    made = by_name(
        options.optimizer, make_schedule(options), options.weight_decay, arguments, rates
    )
    return optax.chain(optax.clip_by_global_norm(options.clip), made)


def start(
    optimizer: optax.GradientTransformation, options: OptimizerOptions, params: Arrays
) -> State:
    """Returns the state before the first step."""
    state = {"params": params, "optimizer": optimizer.init(params), "step": jnp.int32(0)}
    return state | ({"ema": jax.tree.map(jnp.copy, params)} if options.ema else {})


def averaged(state: State) -> Arrays:
    """Returns the parameters to evaluate and export: the moving average if there is one."""
    return state.get("ema", state["params"])


class HasLoss(Protocol):
    """The methods of a `loop.Job` that an update needs."""

    def loss(
        self, params: Arrays, frozen: Arrays, batch: Arrays
    ) -> tuple[Array, dict[str, Array]]: ...


def update(
    job: HasLoss,
    optimizer: optax.GradientTransformation,
    options: OptimizerOptions,
    state: State,
    frozen: Arrays,
    batch: Arrays,
) -> tuple[State, dict[str, Array]]:
    """Runs one step of a `loop.Job`.

    The state is donated, and the new state has the same shardings.

    Returns:
      The new state and the metrics.
    """
    read = gathered(layout(state["params"])), gathered(layout(frozen))
    # Only these options: runs in other folders, or of other lengths, have the same program.
    parts, ema = options.accumulate, options.ema
    return _update(job, optimizer, parts, ema, layout(state), read, state, frozen, batch)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5), donate_argnums=6)
def _update(
    job: HasLoss,
    optimizer: optax.GradientTransformation,
    parts: int,
    ema: float,
    layout: Layout,
    read: tuple[Layout, Layout],
    state: State,
    frozen: Arrays,
    batch: Arrays,
) -> tuple[State, dict[str, Array]]:
    def loss_of(params: Arrays, frozen: Arrays, batch: Arrays) -> tuple[Array, dict[str, Array]]:
        return job.loss(constrain_like(params, read[0]), constrain_like(frozen, read[1]), batch)

    loss, metrics, grads = gradient(loss_of, parts, state["params"], frozen, batch)
    changes, optimizer_state = optimizer.update(grads, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], changes)
    after = {"params": params, "optimizer": optimizer_state, "step": state["step"] + 1}
    if ema:
        after["ema"] = optax.incremental_update(params, state["ema"], 1 - ema)
    rates = rates_of(optimizer_state)
    metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), **rates, **metrics}
    return constrain_like(after, layout), metrics


def gradient(
    loss: Loss, parts: int, params: Arrays, frozen: Arrays, batch: Arrays
) -> tuple[Array, dict[str, Array], Arrays]:
    """Returns loss, metrics and gradient of a batch that is read in `parts` parts along axis 0.

    A loss that is a weighted mean returns its total weight as the metric `weight`, so that the mean
    over the parts equals the mean over the whole batch.  Without it all parts have the same weight.
    """
    differentiate = jax.value_and_grad(loss, has_aux=True)

    def read(part: Arrays) -> tuple[Array, dict[str, Array], Arrays]:
        (value, metrics), grads = differentiate(params, frozen, part)
        metrics = {"loss": value, **metrics}
        weight = jnp.asarray(metrics.pop("weight", 1.0), jnp.float32)
        return weight, metrics, grads

    if parts == 1:
        _, metrics, grads = read(batch)
        return metrics.pop("loss"), metrics, grads

    def add(total: Arrays, part: Arrays) -> tuple[Arrays, tuple[Array, dict[str, Array]]]:
        weight, metrics, grads = read(part)
        return jax.tree.map(lambda t, g: t + weight * g, total, grads), (weight, metrics)

    # Part i has the rows i, i + parts, ..., so on a mesh every device holds equally many of them.
    batch = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)
    zeros = jax.tree.map(jnp.zeros_like, params)
    total, (weights, metrics) = jax.lax.scan(add, zeros, batch)
    whole = jnp.maximum(weights.sum(), 1e-9)
    metrics = {name: (weights * values).sum() / whole for name, values in metrics.items()}
    return metrics.pop("loss"), metrics, jax.tree.map(lambda t: t / whole, total)
