"""Moves small arrays between two meshes, in one process or between several.

In one process `jax.device_put` copies them without waiting.  Between processes a program of one
device of each process sends them to all of these; every process calls it, in the same order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax._internal.platforms import Device
from specjax.parallel import by_row, mesh_of

_T = TypeVar("_T")


def is_here(mesh: Mesh) -> bool:
    """Returns whether this process has devices of `mesh`."""
    return any(device.process_index == jax.process_index() for device in mesh.devices.flat)


def send(arrays: _T | None, shapes: _T, source: Mesh, to: Mesh) -> _T | None:
    """Puts `arrays` of `source`, whose axis 0 is the row, onto `to`, split by row.

    Args:
      arrays: None in processes without devices of `source`.
      shapes: their shapes and types, the same in every process.
      source, to: disjoint meshes.

    Returns:
      None in processes without devices of `to`.
    """
    at = by_row(to)
    processes = {d.process_index for mesh in (source, to) for d in mesh.devices.flat}
    if len(processes) == 1:
        return jax.device_put(arrays, at)
    devices = _one_of_each(source, to)
    first = next(n for n, d in enumerate(devices) if d.process_index in _processes(source))
    leaves, structure = jax.tree.flatten(shapes)
    kinds: dict[np.dtype, list[int]] = {}
    for n, leaf in enumerate(leaves):
        kinds.setdefault(np.dtype(leaf.dtype), []).append(n)
    given: list[Array | None] = [None] * len(leaves)
    if is_here(source):
        given = jax.tree.leaves(arrays)
    made: list[Array | None] = [None] * len(leaves)
    for dtype, which in kinds.items():  # one collective for each type
        sizes = [math.prod(leaves[n].shape) for n in which]
        own = [x for x in (given[n] for n in which) if x is not None]
        flat = _broadcast(_local(own, dtype) if own else None, sum(sizes), dtype, devices, first)
        if not is_here(to):
            continue
        parts = jnp.split(flat, np.cumsum(sizes)[:-1])
        for n, part in zip(which, parts, strict=True):
            made[n] = _placed(part.reshape(leaves[n].shape), at)
    return jax.tree.unflatten(structure, made) if is_here(to) else None


def _processes(mesh: Mesh) -> set[int]:
    return {device.process_index for device in mesh.devices.flat}


@functools.cache
def _one_of_each(source: Mesh, to: Mesh) -> tuple[Device, ...]:
    """Returns one device of each process that has devices of one of two meshes."""
    chosen: dict[int, Device] = {}
    for mesh in (source, to):
        for device in mesh.devices.flat:
            chosen.setdefault(device.process_index, device)
    return tuple(chosen[process] for process in sorted(chosen))


def _local(arrays: list[Array], dtype: np.dtype) -> Array:
    """Returns arrays as one flat array on a device of this process."""
    mesh = mesh_of(arrays)
    assert mesh is not None  # `send` sends from a mesh
    whole = [jax.device_put(x, NamedSharding(mesh, PartitionSpec())) for x in arrays]
    own = [x.addressable_shards[0].data.ravel() for x in whole]
    return jnp.concatenate(own).astype(dtype)


def _broadcast(
    own: Array | None, size: int, dtype: np.dtype, devices: tuple[Device, ...], first: int
) -> Array:
    """Returns the array [size] of device `first`, on the device of this process."""
    (here,) = (device for device in devices if device.process_index == jax.process_index())
    part = jnp.zeros((1, size), dtype) if own is None else own[None]
    mesh = Mesh(np.array(devices), ("process",))
    split = NamedSharding(mesh, PartitionSpec("process"))
    each = jax.make_array_from_single_device_arrays(
        (len(devices), size), split, [jax.device_put(part, here)]
    )
    return _first(mesh, first)(each).addressable_shards[0].data


@functools.cache
def _first(mesh: Mesh, first: int) -> Callable[[Array], Array]:
    return jax.jit(lambda x: x[first], out_shardings=NamedSharding(mesh, PartitionSpec()))


def _placed(array: Array, at: NamedSharding) -> Array:
    """Puts an array, which this process has in full, onto its own shard of a sharding."""
    if at.is_fully_addressable:
        return jax.device_put(array, at)
    shards = [
        jax.device_put(array[index], device)
        for device, index in at.addressable_devices_indices_map(array.shape).items()
    ]
    return jax.make_array_from_single_device_arrays(array.shape, at, shards)
