"""Where the parameters of a model, and the state of a decoder, lie on a mesh of devices.

Every parameter of a Linen module names its axes (`flax.linen.with_logical_partitioning`); `RULES` maps those names to
the axes of a mesh.  Computation follows: `jax.jit` partitions a program by the sharding of what it is given.

A state is split by row, and the heads of a cache are split as the projections that make them.  So a step moves
activations between the devices, and neither weights nor caches.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specjax.caches import KVCache
from specjax.models import LinenModel

Rules = Mapping[str, str | tuple[str, ...] | None]

RULES: Rules = {
    "batch": ("data", "fsdp"),
    "vocab": "model",
    "heads": "model",
    "kv_heads": "model",
    "mlp": "model",
    "expert_mlp": "model",
}
"""Logical axis -> axis of the mesh; what is not here lies whole on every device.

Megatron's split (Shoeybi et al. 2019, arXiv 1909.08053, section 3): the first matrix of a branch by columns, the second
by rows, so that a branch costs one sum over the devices.
"""

TRAINING_RULES: Rules = {**RULES, "embed": "fsdp"}
"""Those of training: a device along `fsdp` keeps its part of every parameter, of its gradient and of the optimizer's
state, and gathers a layer's when it is read (Rajbhandari et al. 2019, arXiv 1910.02054, section 5.3)."""

_AXES = ("data", "fsdp", "model")
_INDIVISIBLE = ("kv_heads", "vocab")
"""Their number is the checkpoint's own: where the mesh does not divide it, they lie whole on every device."""


def make_mesh(
    data: int = 1, model: int | None = None, devices: Any = None, *, fsdp: int = 1
) -> Mesh:
    """A mesh with the axes `data` (rows of a batch) and `model` (parts of a layer), and `fsdp` where it is not 1.

    Args:
      data: devices along `data`.
      model: devices along `model`; by default all that are left.
      devices: by default all of this process group.
      fsdp: devices along `fsdp`, which is for training: rows are split along it as along `data`, and parameters, too.

    Raises:
      ValueError: the product is not the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    model = max(len(devices) // (data * fsdp), 1) if model is None else model
    if data * fsdp * model != len(devices):
        asked = f"data={data} times " + f"fsdp={fsdp} times " * (fsdp != 1) + f"model={model}"
        count = len({device.process_index for device in devices})
        raise ValueError(
            f"{asked} is not the number of devices, {len(devices)}{f' in {count} processes' * (count > 1)}: pass "
            "factors of it, or devices="
        )
    sizes = {"data": data, "fsdp": fsdp, "model": model}
    sizes = {name: size for name, size in sizes.items() if name != "fsdp" or size != 1}
    # Named on purpose: the default of axis_types has changed between versions of jax.
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)


def parse_mesh(text: str) -> dict[str, int]:
    """What `make_mesh` takes, from "data=2,fsdp=2,model=2".  Raises ValueError for another form."""
    sizes = {name: size for name, _, size in (part.partition("=") for part in text.split(","))}
    if not sizes.keys() <= set(_AXES) or not all(
        size.isdecimal() and int(size) for size in sizes.values()
    ):
        raise ValueError(
            f"{text!r}: it must look like data=2,model=4, numbers of devices along {', '.join(_AXES)}"
        )
    return {name: int(size) for name, size in sizes.items()}


def shardings(model: LinenModel, mesh: Mesh, rules: Rules = RULES) -> Any:
    """A tree of `NamedSharding` like the parameters of `model`.

    Args:
      model: a Linen module whose parameters name their axes; those that do not lie whole on every device.
      mesh: with the axes that `rules` names; one that it lacks is not used.
      rules: logical axis -> axis of the mesh.

    Raises:
      ValueError: a dimension that the mesh does not divide.
    """
    tokens = jnp.zeros((1, 1), jnp.int32)
    return module_shardings(model.module, mesh, rules, tokens, tokens)


def module_shardings(module: nn.Module, mesh: Mesh, rules: Rules, *inputs: Array) -> Any:
    """`shardings` of any Linen module, which is called with `inputs`."""
    boxed = jax.eval_shape(module.init, jax.random.key(0), *inputs)["params"]
    config = getattr(module, "config", None)
    # A projection is split between heads, never inside one.
    units = {name: getattr(config, f"num_{name}", 0) for name in ("heads", "kv_heads")}

    def place(path, spec, leaf):
        if spec is None:
            return NamedSharding(mesh, PartitionSpec())
        axes: list[str | tuple[str, ...] | None] = []
        for name, size in zip(
            (*spec, *[None] * (len(leaf.shape) - len(spec))), leaf.shape, strict=True
        ):
            axis = _axes(mesh, rules.get(name or ""))
            parts = _size(mesh, axis)
            count = math.gcd(units.get(name or "", 0), size)
            if count % parts and name not in _INDIVISIBLE:
                raise ValueError(
                    f"{jax.tree_util.keystr(path)} has {count} {name}, which {parts} devices along the mesh axis "
                    f"{', '.join(axis)} do not divide, and {math.gcd(count, parts)} would: take a smaller axis, or "
                    f"pass rules={{**RULES, {name!r}: None}}"
                )
            axes.append(_entry(axis) if count % parts == 0 else None)
        return NamedSharding(mesh, PartitionSpec(*axes))

    leaves = nn.meta.unbox(boxed)
    return jax.tree_util.tree_map_with_path(
        place,
        nn.get_partition_spec(boxed),
        leaves,
        is_leaf=lambda x: x is None or isinstance(x, PartitionSpec),
    )


def lay(model: Any, params: Any, mesh: Mesh, rules: Rules = RULES) -> Any:
    """`params` on the devices of `mesh`, as `shardings` says; those of a model that names no axes whole on each.

    Raises:
      ValueError: a dimension that the mesh does not divide, or parameters in int8.
    """
    if mesh_of(params) == mesh:
        return params
    if not isinstance(model, LinenModel):
        return beside(params, mesh)
    at = shardings(model, mesh, rules)
    if jax.tree.structure(at) != jax.tree.structure(params):
        raise ValueError(
            "quantised parameters name no axes: specjax.load(..., mesh=) first, and quantise then"
        )
    return jax.tree.map(put, params, at)


def beside(arrays: Any, mesh: Mesh | None) -> Any:
    """What does not lie on `mesh` yet, whole on each of its devices."""
    if mesh is None:
        return arrays
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda leaf: leaf if mesh_of(leaf) == mesh else put(leaf, whole), arrays)


def put(array: Any, at: NamedSharding) -> Array:
    """An array, of which every process has the whole, onto devices of several processes."""
    if at.is_fully_addressable:
        return jax.device_put(array, at)
    whole = np.asarray(array)
    return jax.make_array_from_callback(whole.shape, at, lambda index: whole[index])


def leader() -> bool:
    """Is this the process that prints and writes?"""
    return jax.process_index() == 0


def to_host(arrays: Any) -> Any:
    """NumPy arrays of a tree, whole in every process; each of them must call, since they send each other what lacks."""

    def fetch(leaf):
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
            return np.asarray(leaf)
        at = _named(leaf)
        assert at is not None  # no other kind lies in several processes
        return np.asarray(_gather(NamedSharding(at.mesh, PartitionSpec()))(leaf))

    return jax.tree.map(fetch, arrays)


@functools.cache
def _gather(whole: NamedSharding) -> Any:
    return jax.jit(lambda x: x, out_shardings=whole)


def mesh_of(arrays: Any) -> Mesh | None:
    """The mesh that they lie on; None where they lie on one device, or are being traced."""
    meshes: Any = (
        at.mesh for at in map(_named, jax.tree.leaves(arrays)) if at is not None
    )  # never abstract ones
    return next(meshes, None)


def is_split(arrays: Any) -> bool:
    """Does a device hold a part of one of them only?"""
    return any(
        at is not None and not at.is_fully_replicated for at in map(_named, jax.tree.leaves(arrays))
    )


def row_parts(mesh: Mesh | None, rules: Rules = RULES) -> int:
    """A batch is split into so many parts, and so must have a multiple of as many rows."""
    return 1 if mesh is None else _size(mesh, _axes(mesh, rules.get("batch")))


def by_row(mesh: Mesh, rules: Rules = RULES) -> NamedSharding:
    """Arrays whose axis 0 are rows."""
    rows = _axes(mesh, rules.get("batch"))
    return NamedSharding(mesh, PartitionSpec(_entry(rows)) if rows else PartitionSpec())


def spread(state: Any, mesh: Mesh | None, split_heads: bool, rules: Rules = RULES) -> Any:
    """Inside a jitted function: a fresh state on a mesh, every leaf by row, the layers of a cache by head too.

    Args:
      state: of a decoder or of a part of it; its rows are a multiple of `row_parts`.
      mesh: None leaves it where it is.
      split_heads: as the model's parameters are.  Fewer heads than devices, or a number that these do not divide, lie
        whole on every device.
      rules: as for `shardings`.
    """
    if mesh is None:
        return state
    rows = by_row(mesh, rules)
    axis = _axes(mesh, rules.get("kv_heads"))
    parts = _size(mesh, axis) if split_heads else 1

    def place(leaf):
        at = rows
        if isinstance(leaf, KVCache):
            if parts > 1 and leaf.keys[0].shape[1] % parts == 0:
                at = NamedSharding(mesh, PartitionSpec(*(rows.spec or (None,)), _entry(axis)))
            leaf = dataclasses.replace(leaf, sharding=at)
            at = dataclasses.replace(jax.tree.map(lambda _: at, leaf), length=rows)
        return jax.lax.with_sharding_constraint(leaf, at)

    return jax.tree.map(place, state, is_leaf=lambda x: isinstance(x, KVCache))


def layout(state: Any) -> tuple[NamedSharding | None, ...] | None:
    """Where each leaf lies on its mesh: hashable, for `hold`; None where all lie on one device, or are being traced."""
    found = tuple(map(_named, jax.tree.leaves(state)))
    return found if any(found) else None


def hold(state: Any, layout: tuple[NamedSharding | None, ...] | None) -> Any:
    """Inside a jitted function: `state` as it lay.  Only so is a donated buffer certain to be used again."""
    if layout is None:
        return state
    leaves, structure = jax.tree.flatten(state)
    held = [
        x if at is None else jax.lax.with_sharding_constraint(x, at)
        for x, at in zip(leaves, layout, strict=True)
    ]
    return jax.tree.unflatten(structure, held)


def _axes(mesh: Mesh, rule: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The axes that a rule names and along which the mesh has more than one device."""
    return tuple(
        axis
        for axis in ((rule,) if isinstance(rule, str) else rule or ())
        if mesh.shape.get(axis, 1) > 1
    )


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """In the one form of a PartitionSpec that others compare as equal."""
    return axes if len(axes) > 1 else axes[0] if axes else None


def _size(mesh: Mesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _named(leaf: Any) -> NamedSharding | None:
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
        return None
    return leaf.sharding if isinstance(leaf.sharding, NamedSharding) else None
