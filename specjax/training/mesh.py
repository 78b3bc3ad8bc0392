"""A run on several devices: the same job, with its state and its batches laid onto a mesh.

    data    each device reads its rows of a batch; gradients are summed
    fsdp    and keeps its part of parameters, gradients and optimizer; a layer is gathered when it is read
    model   and multiplies its part of every layer; sums travel

`jax.jit` does the rest: the update is one program, partitioned by how what it is given lies.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.parallel import by_row, make_mesh, parse_mesh, put, row_parts
from specjax.training.options import Options, option


@dataclasses.dataclass(frozen=True)
class MeshOptions(Options):
    """Devices and processes.  What they come to does not depend on them: a run may be resumed on others."""

    mesh: str | None = option(
        None,
        "devices, as data=2,fsdp=2,model=2: rows, rows and parameters, parts of layers; none: one",
        free=True,
    )
    coordinator: str | None = option(
        None,
        "of several processes, HOST:PORT of the first, or auto: a cluster's environment says",
        free=True,
    )
    num_processes: int | None = option(None, "how many; else JAX_NUM_PROCESSES", free=True)
    process_id: int | None = option(
        None, "which of them this is, from 0; else JAX_PROCESS_ID", free=True
    )


def mesh_sizes(options: MeshOptions) -> dict[str, int] | None:
    """What `make_mesh` takes; without --mesh the devices of several processes along `data`, and of one process one.

    Raises:
      ValueError: --mesh has another form.
    """
    if options.mesh is not None:
        return {"model": 1, **parse_mesh(options.mesh)}
    return None if jax.process_count() == 1 else {"data": jax.device_count(), "model": 1}


def mesh_of_run(options: Any) -> Mesh | None:
    """The mesh of the options.

    Raises:
      ValueError: it has not as many devices as there are, or does not divide the rows that are read at a time.
    """
    sizes = mesh_sizes(options)
    mesh = None if sizes is None else make_mesh(**sizes)
    rows, parts = options.batch_size // options.accumulate, row_parts(mesh)
    if rows % parts:
        raise ValueError(
            f"--batch-size {options.batch_size} read in --accumulate {options.accumulate} parts is {rows} sequences at "
            f"a time, which {parts} devices along data and fsdp do not divide: take a batch of "
            f"{-(-rows // parts) * parts * options.accumulate}, or another --mesh"
        )
    return mesh


def lay_state(
    state: dict[str, Any], optimizer: optax.GradientTransformation, mesh: Mesh | None
) -> dict[str, Any]:
    """A state whose parameters lie on `mesh`, wholly there: what the optimizer keeps of each lies as it does."""
    if mesh is None:
        return state
    whole = NamedSharding(mesh, PartitionSpec())
    like = jax.tree.map(lambda leaf: leaf.sharding, state["params"])
    at = {
        name: like if name == "ema" else jax.tree.map(lambda _: whole, value)
        for name, value in state.items()
    }
    at |= {"params": like, "optimizer": optax.tree_map_params(
        optimizer, lambda _, place: place, state["optimizer"], like, transform_non_params=lambda _: whole
    )}  # fmt: skip
    return jax.tree.map(
        lambda leaf, place: leaf if leaf.sharding == place else put(leaf, place), state, at
    )


def gathered(
    layout: tuple[NamedSharding | None, ...] | None,
) -> tuple[NamedSharding | None, ...] | None:
    """As parameters lie while a step reads them: whole along `fsdp`.

    Left to itself, XLA would split the features of activations along `fsdp`, as the matrices that they meet are, and
    send activations to and fro where their rows are split.
    """

    def gather(at):
        spec = (
            tuple(a for a in (part if isinstance(part, tuple) else (part,)) if a != "fsdp")
            for part in at.spec
        )
        return NamedSharding(
            at.mesh, PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in spec))
        )

    return None if layout is None else tuple(None if at is None else gather(at) for at in layout)


def lay_batch(batch: Any, mesh: Mesh | None) -> Any:
    """Rows of arrays, which every process can say, each on the devices that read it."""
    return (
        batch
        if mesh is None
        else jax.tree.map(lambda leaf: put(np.asarray(leaf), by_row(mesh)), batch)
    )


class Agreement:
    """Does any process want to end?  All hear of it in the same step, one later than it was said."""

    def __init__(self, mesh: Mesh | None):
        self._mesh, self._said = mesh if jax.process_count() > 1 else None, None

    def ask(self, wanted: bool) -> bool:
        """What was said at the last call, while this one's answer is on its way; of one process, at this one."""
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
    """Wait until every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)
