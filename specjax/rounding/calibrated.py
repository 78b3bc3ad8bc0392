"""Rounds a model layer by layer with GPTQ.

The inputs of a layer are those that the rounded layers before it give, and each of its matrices is
rounded for what that matrix reads before the layer itself is rounded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

from specjax.models import LanguageModel, Ran, run_layer
from specjax.types import Weights

_ROWS = 4096
"""The most tokens that a layer reads at once."""

_Path = tuple[str, ...]
Rounding = Callable[[_Path, Array | None], Any]
"""Rounds the parameter at a path for the products of its inputs; None if they were not seen."""


def round_layers(
    model: LanguageModel, leaves: Mapping[_Path, Any], tokens: np.ndarray, to: Rounding
) -> dict[_Path, Any]:
    """Returns the parameters that are rounded, by their paths.

    Args:
      model: a `Transformer` on one device.
      leaves: its parameters that are to be rounded.
      tokens: [P, L], the text that it reads.
      to: see there.
    """
    network, params, made = model.model, dict(model.params), {}
    config = network.module.config
    rows = max(_ROWS // tokens.shape[1], 1)
    batches = [jnp.asarray(tokens[at : at + rows]) for at in range(0, len(tokens), rows)]
    streams: list[Array | None] = [None] * len(batches)
    written: list[dict[int, Any]] = [{} for _ in batches]
    shared = {config.owner_of(i) for i in range(config.num_layers) if config.owner_of(i) != i}
    names = [f"layer_{i}" for i in range(config.num_layers)]
    for i, name in enumerate(tqdm(names, desc="rounding", unit="layer", disable=None, leave=False)):
        run = jax.jit(functools.partial(_run, network, i))
        products: dict[_Path, Array] = {}
        for batch, stream, kept in zip(batches, streams, written, strict=True):
            for path, more in run(params, batch, stream, kept).products.items():
                products[path] = products[path] + more if path in products else more
        mine = [path for path in leaves if path[0] == name]
        rounded = {path: to(path, products.get(path[:-1])) for path in mine}
        made |= rounded
        params[name] = _with(params[name], {path[1:]: leaf for path, leaf in rounded.items()})
        for k, batch in enumerate(batches):
            ran = run(params, batch, streams[k], written[k])
            streams[k] = jax.block_until_ready(ran.stream)
            if i in shared:
                written[k][i] = ran.written
    for path in leaves:
        if path not in made:
            made[path] = to(path, None)  # outside of the layers
    return made


def _run(
    network: Any,
    index: int,
    params: Weights,
    tokens: Array,
    stream: Array | None,
    written: Mapping[int, Any],
) -> Ran:
    return run_layer(network.module, params, tokens, index, stream, written)


def _with(tree: Mapping[str, Any], leaves: Mapping[_Path, Any]) -> dict[str, Any]:
    """Returns a tree with other leaves at these paths."""
    made = dict(tree)
    for path, leaf in leaves.items():
        first, *rest = path
        made[first] = _with(made[first], {tuple(rest): leaf}) if rest else leaf
    return made
