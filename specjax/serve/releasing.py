"""Takes arrays of an engine away from its devices, and puts them back as they were."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
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


def twins(tree: Arrays) -> Arrays:
    """Returns other arrays with the same memory: who holds the first ones does not hold these."""

    def twin(leaf: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
        if not isinstance(leaf, jax.Array):
            return leaf
        parts = [shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)

    return jax.tree.map(twin, tree)


def take_arrays(tree: Arrays, kept: Collection[int]) -> Callable[[], Arrays]:
    """Moves arrays to the host, and deletes them; returns what puts them back.

    Args:
      tree: arrays of devices; others in it stay as they are.
      kept: the `id` of those that stay.
    """
    leaves, form = jax.tree.flatten(tree)
    taken = {
        id(leaf): leaf for leaf in leaves if isinstance(leaf, jax.Array) and id(leaf) not in kept
    }
    # All of them, before the first is deleted: the host's memory may not suffice.
    host = {name: (np.array(leaf), _place(leaf)) for name, leaf in taken.items()}
    for leaf in taken.values():
        leaf.delete()

    def again() -> Arrays:
        made = {name: jax.device_put(*held) for name, held in host.items()}
        return jax.tree.unflatten(form, [made.get(id(leaf), leaf) for leaf in leaves])

    return again


def _is_key(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _place(leaf: jax.Array) -> jax.sharding.Sharding | None:
    """Returns where an array was put; None for others, for which programs are not made again."""
    return leaf.sharding if leaf.committed else None
