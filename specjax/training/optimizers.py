"""The optimizers of optax by their names, and the parameters that each of them changes.

Muon orthogonalises the updates of matrices, so it changes only the matrices of layers; AdamW
changes embeddings, output matrices, norms and other vectors.  Muon's updates are scaled to the size
of AdamW's, so one learning rate serves both (Liu et al. 2025, arXiv 2502.16982, equation 4).
"""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax import Array
from jax.tree_util import KeyPath

from specjax.types import ArrayTree

ADAMW, MUON = "adamw", "muon"
OPTIMIZERS = (
    ADAMW, MUON, "adabelief", "adafactor", "adagrad", "adam", "adamax", "adamaxw", "adan",
    "ademamix", "adopt", "amsgrad", "lamb", "lars", "lion", "nadam", "nadamw", "novograd", "radam",
    "rmsprop", "sgd", "sign_sgd", "sm3", "yogi",
)  # fmt: skip
"""Optimizers that need nothing but a gradient and a learning rate."""

_SIZE = 0.2  # the root mean square of an update of AdamW, about
_MATRICES, _OTHERS = "matrices", "others"
_DECAY = ("weight_decay", ("mask", "weight_decay_mask"))

Factory = Callable[..., optax.GradientTransformation]


def check_arguments(name: str, arguments: Sequence[str]) -> dict[str, float]:
    """Returns the arguments of an optimizer from texts like `b1=0.95`."""
    known = [p for p in inspect.signature(_made_by(name)).parameters if p != "learning_rate"]
    found = {}
    for text in arguments:
        key, _, value = text.partition("=")
        if key not in known:
            near = [f"; is it {name!r}?" for name in difflib.get_close_matches(key, known, 1)]
            raise ValueError(
                f"--optimizer-args {text}: {name} of optax has no argument {key!r}{''.join(near)}"
                f"  It has {', '.join(known)}"
            )
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = None
        if not isinstance(found[key], bool | int | float):
            raise ValueError(
                f"--optimizer-args {text}: {value!r} must be a number, true or false, as in {key}=1"
            )
    return found


def decays(name: str) -> bool:
    """Returns whether the optimizer has a weight decay that can be kept to matrices."""
    parameters = inspect.signature(_made_by(name)).parameters
    return _DECAY[0] in parameters and any(mask in parameters for mask in _DECAY[1])


def by_name(
    name: str,
    schedule: optax.Schedule,
    weight_decay: float,
    arguments: Mapping[str, float],
    factors: Mapping[str, float] | None,
) -> optax.GradientTransformation:
    """Returns one of `OPTIMIZERS`, whose state holds the learning rate of the last step.

    Weights decay on matrices only.  With `factors` the parameters are a dict, and the learning rate
    of each of its keys has a factor.
    """
    groups, parts = {}, (_MATRICES, _OTHERS) if name == MUON else ("",)
    for key, factor in (factors or {"": 1.0}).items():
        for part in parts:
            which = ADAMW if part == _OTHERS else name
            made = _factory(which, weight_decay, arguments if which == name else {})
            rate = _times(schedule, factor)
            groups[_label(key, part)] = optax.inject_hyperparams(made)(learning_rate=rate)
    if len(groups) == 1:
        return next(iter(groups.values()))

    def labels(params: ArrayTree) -> ArrayTree:
        def label(path: KeyPath, leaf: Array) -> str:
            key = str(path[0].key) if factors else ""
            part = "" if name != MUON else _MATRICES if _is_matrix(path, leaf) else _OTHERS
            return _label(key, part)

        return jax.tree_util.tree_map_with_path(label, params)

    return optax.partition(groups, labels)


def rates_of(state: object) -> dict[str, Array]:
    """Returns the learning rates of the last step: `learning_rate`, or one for each group.

    The result is {} for an optimizer that has none, such as a user's own.
    """
    found = {}
    leaves = jax.tree_util.tree_leaves_with_path(
        state, is_leaf=lambda leaf: isinstance(leaf, optax.InjectStatefulHyperparamsState)
    )
    for path, leaf in leaves:
        if isinstance(leaf, optax.InjectStatefulHyperparamsState):
            keys = [str(part.key) for part in path if isinstance(part, jax.tree_util.DictKey)]
            found["_".join(["learning_rate", *keys])] = leaf.hyperparams["learning_rate"]
    return {"learning_rate": next(iter(found.values())), **found} if found else {}


def _made_by(name: str) -> Factory:
    return {**vars(optax.contrib), **vars(optax)}[name]


def _label(key: str, part: str) -> str:
    return "_".join(text for text in (key, part) if text)


def _times(schedule: optax.Schedule, factor: float) -> optax.Schedule:
    return schedule if factor == 1 else lambda step: factor * schedule(step)


def _is_matrix(path: KeyPath, leaf: Array) -> bool:
    """Returns whether a parameter is a matrix between hidden states."""
    names = jax.tree_util.keystr(path)
    return leaf.ndim == 2 and "embedding" not in names and "'head'" not in names


def _factory(name: str, weight_decay: float, arguments: Mapping[str, float]) -> Factory:
    """Returns a function of only the learning rate."""
    made, given = _made_by(name), dict(arguments)
    if name == ADAMW:
        given = {"b2": 0.95, **given}
    if name == MUON:
        return lambda learning_rate: optax.chain(
            made(1.0, **given),
            optax.stateless(_sized),
            optax.add_decayed_weights(weight_decay),
            optax.scale_by_learning_rate(learning_rate),
        )
    parameters = inspect.signature(made).parameters
    if decays(name):
        mask = next(mask for mask in _DECAY[1] if mask in parameters)
        given = {_DECAY[0]: weight_decay, mask: _decayed, **given}
    return lambda learning_rate: made(learning_rate, **given)


def _decayed(params: ArrayTree) -> ArrayTree:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _sized(updates: optax.Updates, _: optax.Params | None) -> optax.Updates:
    """Returns ascending updates of the size of AdamW's, from Muon's descent at a rate of 1.

    Muon scales an orthogonal matrix [n, m] by sqrt(max(1, m / n)), and its root mean square is
    1 / sqrt(max(n, m)).
    """

    def scale(update: Array) -> Array:
        rows, columns = update.shape
        own = jnp.sqrt(jnp.maximum(1.0, columns / rows))
        return -update / own * (_SIZE * max(rows, columns) ** 0.5)

    return jax.tree.map(scale, updates)
