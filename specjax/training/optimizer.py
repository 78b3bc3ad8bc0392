"""The update of a job's parameters: schedule, optimizer, gradient accumulation and averaging."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Protocol, Required, TypedDict, cast

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import NamedSharding

from specjax.options.fields import Options, count, option
from specjax.parallel import constrain_like, layout
from specjax.training.mesh import gathered
from specjax.training.optimizers import ADAMW, OPTIMIZERS, by_name, check_arguments, rates_of
from specjax.training.trees import Batch, Tree

Layout = tuple[NamedSharding | None, ...] | None


class State(TypedDict, total=False):
    """The state of a run."""

    params: Required[Tree]
    optimizer: Required[optax.OptState]
    step: Required[Array]
    ema: Tree  # with --ema
    best: Array  # the greatest value of the goal so far
    since: Array  # the evaluations after it


Loss = Callable[[Tree, Tree, Batch], tuple[Array, dict[str, Array]]]
"""`loss(params, frozen, batch)` returns a scalar and further metrics."""


SCHEDULES = ("wsd", "cosine")


@dataclasses.dataclass(frozen=True)
class OptimizerOptions(Options):
    """The options of the optimizer."""

    group = "optimizer"

    steps: int = count(1000, "optimizer steps", free=True)
    batch_size: int = count(4, "sequences per step")
    accumulate: int = count(
        1, "parts into which a batch is split, read one after the other to save memory"
    )
    optimizer: str = option(
        ADAMW,
        "optimizer of optax; muon changes the matrices of layers, and AdamW the other parameters",
        choices=OPTIMIZERS,
    )
    optimizer_args: tuple[str, ...] = option(
        (), "further arguments of that function of optax, such as b1=0.95"
    )
    learning_rate: float = option(2e-3, "peak learning rate", "(0, inf)")
    schedule: str = option(
        "wsd",
        "schedule of the learning rate; wsd: constant, with a linear decay at the end",
        choices=SCHEDULES,
    )
    warmup_steps: int = count(200, "steps of linear warm-up; fewer if the run is too short", 0)
    warmup_fraction: float = option(
        0.0, "fraction of the run that is warm-up; 0: --warmup-steps decides", "[0, 1]"
    )
    decay_fraction: float = option(
        0.2, "last fraction of the run, in which the rate of wsd falls linearly to zero", "[0, 1]"
    )
    weight_decay: float = option(0.1, "weight decay, on matrices only", "[0, inf)")
    clip: float = option(1.0, "largest norm of the gradient", "(0, inf]: inf is no clipping")
    ema: float = option(
        0.0,
        "decay of a moving average of the parameters, which is evaluated and exported; 0: none",
        "[0, 1): 1 averages nothing",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_arguments(self.optimizer, self.optimizer_args)
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"--accumulate is {self.accumulate}; "
                f"it must divide --batch-size, which is {self.batch_size}"
            )

    @property
    def warmup(self) -> int:
        """The requested steps of warm-up."""
        by_fraction = round(self.steps * self.warmup_fraction)
        return by_fraction if self.warmup_fraction else self.warmup_steps


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
    optimizer: optax.GradientTransformation, options: OptimizerOptions, params: Tree
) -> State:
    """Returns the state before the first step."""
    begun = optimizer.init(cast(optax.Params, params))
    state: State = {"params": params, "optimizer": begun, "step": jnp.int32(0)}
    return {**state, "ema": jax.tree.map(jnp.copy, params)} if options.ema else state


def averaged(state: State) -> Tree:
    """Returns the parameters to evaluate and export: the moving average if there is one."""
    return state.get("ema", state["params"])


class HasLoss(Protocol):
    """The methods of a `loop.Job` that an update needs."""

    def loss(self, params: Tree, frozen: Tree, batch: Batch) -> tuple[Array, dict[str, Array]]: ...


def update(
    job: HasLoss,
    optimizer: optax.GradientTransformation,
    options: OptimizerOptions,
    state: State,
    frozen: Tree,
    batch: Batch,
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
    frozen: Tree,
    batch: Batch,
) -> tuple[State, dict[str, Array]]:
    def loss_of(params: Tree, frozen: Tree, batch: Batch) -> tuple[Array, dict[str, Array]]:
        return job.loss(constrain_like(params, read[0]), constrain_like(frozen, read[1]), batch)

    loss, metrics, grads = gradient(loss_of, parts, state["params"], frozen, batch)
    before = cast(optax.Params, state["params"])
    changes, optimizer_state = optimizer.update(
        cast(optax.Updates, grads), state["optimizer"], before
    )
    made = optax.apply_updates(before, changes)
    after: State = {
        "params": cast(Tree, made),
        "optimizer": optimizer_state,
        "step": state["step"] + 1,
    }
    if ema:
        mean = cast(optax.Params, state.get("ema"))
        after["ema"] = cast(Tree, optax.incremental_update(made, mean, 1 - ema))
    rates = rates_of(optimizer_state)
    metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), **rates, **metrics}
    return constrain_like(after, layout), metrics


def gradient(
    loss: Loss, parts: int, params: Tree, frozen: Tree, batch: Batch
) -> tuple[Array, dict[str, Array], Tree]:
    """Returns loss, metrics and gradient of a batch that is read in `parts` parts along axis 0.

    A loss that is a weighted mean returns its total weight as the metric `weight`, so that the mean
    over the parts equals the mean over the whole batch.  Without it all parts have the same weight.
    """
    differentiate = jax.value_and_grad(loss, has_aux=True)

    def read(part: Batch) -> tuple[Array, dict[str, Array], Tree]:
        (value, metrics), grads = differentiate(params, frozen, part)
        metrics = {"loss": value, **metrics}
        weight = jnp.asarray(metrics.pop("weight", 1.0), jnp.float32)
        return weight, metrics, grads

    if parts == 1:
        _, metrics, grads = read(batch)
        return metrics.pop("loss"), metrics, grads

    def add(total: Tree, part: Batch) -> tuple[Tree, tuple[Array, dict[str, Array]]]:
        weight, metrics, grads = read(part)
        return jax.tree.map(lambda t, g: t + weight * g, total, grads), (weight, metrics)

    # Part i has the rows i, i + parts, ..., so on a mesh every device holds equally many of them.
    batch = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)
    zeros = jax.tree.map(jnp.zeros_like, params)
    total, (weights, metrics) = jax.lax.scan(add, zeros, batch)
    whole = jnp.maximum(weights.sum(), 1e-9)
    metrics = {name: (weights * values).sum() / whole for name, values in metrics.items()}
    return metrics.pop("loss"), metrics, jax.tree.map(lambda t: t / whole, total)
