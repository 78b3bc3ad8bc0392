"""States of which a row is replaced or stopped between two runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, SingleDeviceSharding

from specjax.parallel import constrain_like
from specjax.types import DecodeState

Layout = tuple[NamedSharding | None, ...] | None


def put_row(
    layout: Layout, state: DecodeState, slot: Array | np.ndarray, row: DecodeState
) -> DecodeState:
    """Returns a state with a row in `slot`, and with the shardings `layout`.

    The shardings that the two structures name may differ: those of the state stay.
    """
    leaves, structure = jax.tree.flatten(state)
    put = [x.at[slot].set(y[0]) for x, y in zip(leaves, jax.tree.leaves(row), strict=True)]
    return constrain_like(jax.tree.unflatten(structure, put), layout)


insert = jax.jit(put_row, static_argnums=0, donate_argnums=1)


def stopped(done: Array, stop: Array | np.ndarray) -> Array:
    """Returns done | stop [B]; on the host if that gives the same kind of array.

    An operation outside a program would be a program of its own.
    """
    if isinstance(done.sharding, SingleDeviceSharding) and not getattr(done, "committed", True):
        return jax.device_put(np.asarray(done) | np.asarray(stop))
    return done | jnp.asarray(stop)
