"""Takes arrays of an engine away from its devices, and puts them back as they were."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from specjax.serve.batch import Device
    from specjax.types import Arrays

CACHES, WEIGHTS = PARTS = ("kv_cache", "weights")
"""What can be released, by SGLang's names."""


def take_caches(device: Device) -> Callable[[], None]:
    """Frees the caches of a device on which no row is live; returns what makes them again, empty.

    Rows that are done read their caches, and nobody reads what comes of it.
    """
    assert device.state is not None
    held, form = jax.tree.flatten((device.state.cache, device.state.proposer, device.pools))
    places = [_place(leaf) for leaf in held]
    for leaf in held:
        if not _is_key(leaf):
            leaf.delete()

    def again() -> None:
        assert device.state is not None
        made = [
            leaf if _is_key(leaf) else jax.device_put(np.zeros(leaf.shape, leaf.dtype), place)
            for leaf, place in zip(held, places, strict=True)
        ]
        cache, proposer, pools = jax.tree.unflatten(form, made)
        device.state = dataclasses.replace(device.state, cache=cache, proposer=proposer)
        device.pools = pools

    return again


def take_arrays(tree: Arrays) -> Callable[[], Arrays]:
    """Moves arrays to the host, and deletes them; returns what puts them back."""
    leaves, form = jax.tree.flatten(tree)
    host: dict[int, np.ndarray] = {}
    places = [_place(leaf) for leaf in leaves]
    for leaf in leaves:
        if id(leaf) not in host:
            host[id(leaf)] = np.array(leaf)
            leaf.delete()
    kept = [host[id(leaf)] for leaf in leaves]

    def again() -> Arrays:
        return jax.tree.unflatten(form, list(map(jax.device_put, kept, places)))

    return again


def _is_key(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _place(leaf: jax.Array) -> jax.sharding.Sharding | None:
    """Returns where an array was put; None for others, for which programs are not made again."""
    return leaf.sharding if leaf.committed else None
