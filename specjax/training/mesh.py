"""A run on several devices: the same job, with its state and its batches on a mesh.

    data    each device reads its rows of a batch; gradients are summed
    fsdp    splits the rows in the same way, and also parameters, gradients and optimizer state; a
            layer is gathered when it is read
    model   each device multiplies with its part of every layer; partial sums are exchanged

`jax.jit` does the rest: the update is one program, partitioned by the shardings of its arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeVar, cast, overload

import jax
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from specjax.options.fields import option
from specjax.options.processes import ProcessOptions
from specjax.parallel import by_row, make_mesh, parse_mesh, put
from specjax.training.trees import Batch

StateT = TypeVar("StateT", bound=Mapping[str, object])


@dataclasses.dataclass(frozen=True)
class MeshOptions(ProcessOptions):
    """The devices and processes of a run, which may be resumed on others."""

    mesh: str | None = option(
        None, "devices along each axis, as data=2,fsdp=2,model=2; without it, one device", free=True
    )


def mesh_sizes(options: MeshOptions) -> dict[str, int] | None:
    """Returns the sizes that `make_mesh` takes; None for a single device.

    Without --mesh, one process uses one device, and several processes put all their devices along
    `data`.

    Raises:
      ValueError: --mesh is malformed.
    """
    if options.mesh is not None:
        return {"model": 1, **parse_mesh(options.mesh)}
    return None if jax.process_count() == 1 else {"data": jax.device_count(), "model": 1}


def mesh_of_sizes(sizes: dict[str, int] | None) -> Mesh | None:
    """Returns the mesh of the result of `mesh_sizes`."""
    if sizes is None:
        return None
    fsdp, copies = sizes.get("fsdp", 1), sizes.get("kv_copies", 1)
    return make_mesh(sizes.get("data", 1), sizes.get("model"), fsdp=fsdp, kv_copies=copies)


def lay_state(state: StateT, mesh: Mesh | None) -> StateT:
    """Shards the whole state over the mesh of its parameters.

    The optimizer's moments of a parameter are split like the parameter; the rest is replicated.
    """
    if mesh is None:
        return state
    whole = NamedSharding(mesh, PartitionSpec())
    params = dict(jax.tree_util.tree_leaves_with_path(state["params"]))

    def sharding(path: KeyPath, leaf: Array) -> NamedSharding:
        # A moment has the shape of its parameter, and its path ends with that of the parameter.
        for first in range(len(path)):
            param = params.get(path[first:])
            if param is not None and param.shape == np.shape(leaf):
                return param.sharding
        return whole

    at = jax.tree_util.tree_map_with_path(sharding, state)
    return jax.tree.map(
        lambda leaf, sharding: leaf if leaf.sharding == sharding else put(leaf, sharding), state, at
    )


def gathered(
    layout: tuple[NamedSharding | None, ...] | None,
) -> tuple[NamedSharding | None, ...] | None:
    """Returns the shardings of parameters while a step reads them: not split along `fsdp`.

    Otherwise XLA would split the last axis of activations along `fsdp`, like the matrices they are
    multiplied with, and move activations between devices, since their rows are split too.
    """

    def gather(at: NamedSharding) -> NamedSharding:
        spec = (
            tuple(a for a in (part if isinstance(part, tuple) else (part,)) if a != "fsdp")
            for part in at.spec
        )
        return NamedSharding(
            at.mesh, PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in spec))
        )

    return None if layout is None else tuple(None if at is None else gather(at) for at in layout)


@overload
def lay_batch(batch: np.ndarray, mesh: Mesh | None) -> Array: ...
@overload
def lay_batch(batch: Mapping[str, np.ndarray], mesh: Mesh | None) -> Batch: ...
def lay_batch(batch: np.ndarray | Mapping[str, np.ndarray], mesh: Mesh | None) -> Array | Batch:
    """Shards a batch over the devices that read it.  Each process passes all of it."""
    if mesh is None:
        return cast(Batch, batch)
    return jax.tree.map(lambda leaf: put(np.asarray(leaf), by_row(mesh)), batch)


class Agreement:
    """Lets all processes end after the same step if any of them is asked to end.

    With several processes the answer comes one step late, so that no step waits for it.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        self._mesh, self._said = mesh if jax.process_count() > 1 else None, None

    def ask(self, wanted: bool) -> bool:
        """Returns whether any process passed True in the previous call, or one process in this."""
        if self._mesh is None:
            return wanted
        everywhere = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names))
        flags = jax.make_array_from_callback(
            (self._mesh.size,), everywhere, lambda _: np.full(1, wanted)
        )
        before, self._said = self._said, _any(flags)
        return before is not None and bool(before)


@jax.jit
def _any(flags: Array) -> Array:
    return flags.any()


def together(what: str) -> None:
    """Waits until every process has reached this call."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)
