"""Medusa heads for the tests: their formula by hand, and random heads for the shipped tiny
target."""

import dataclasses
import pathlib

import jax
import numpy as np
from toys import TABLES as toys

from specjax import MedusaAdapter

HEAD = toys.weights()["head"]["kernel"]
TINY = pathlib.Path(__file__).parent.parent / "checkpoints" / "tiny" / "target"


def by_hand(heads, params, hidden):
    """[..., K, V] in float64, computed head by head."""
    hidden, logits = np.asarray(hidden, np.float64), []
    for k in range(heads.num_heads):
        x = hidden
        for layer in range(heads.num_layers):
            z = x @ np.asarray(params["kernel"][layer][k], np.float64) + np.asarray(
                params["bias"][layer][k]
            )
            x = x + z / (1 + np.exp(-z))
        logits.append(x @ np.asarray(params["head"][k] if heads.own_heads else HEAD, np.float64))
    return np.stack(logits, axis=-2)


def random_heads(target, seed, **form):
    """Random heads for `target`, with a tree of three choices."""
    adapter = MedusaAdapter.create(target, 2, name=f"heads {seed}", **form)
    keys = iter(jax.random.split(jax.random.key(seed), 9))
    params = jax.tree.map(
        lambda leaf: leaf + 0.1 * jax.random.normal(next(keys), leaf.shape), adapter.params
    )
    return dataclasses.replace(adapter, params=params, choices=((0,), (1,), (0, 0)))
