"""Where the parameters of a model, and the state of a decoder, lie on a mesh of devices.

Every parameter of a Linen module names its axes (`flax.linen.with_logical_partitioning`); `RULES` maps those names to
the axes of a mesh.  Computation follows: `jax.jit` partitions a program by the sharding of what it is given.

A state is split by row, and the heads of a cache are split as the projections that make them.  So a step moves
activations between the devices, and neither weights nor caches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specjax.cache import KVCache
from specjax.models import LinenModel

RULES: dict[str, str | None] = {
    "batch": "data",
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

_INDIVISIBLE = ("kv_heads", "vocab")
"""Their number is the checkpoint's own: where the mesh does not divide it, they lie whole on every device."""


def make_mesh(data: int = 1, model: int | None = None, devices: Any = None) -> Mesh:
    """A mesh with the axes `data` (rows of a batch) and `model` (parts of a layer).

    Args:
      data: devices along `data`.
      model: devices along `model`; by default all that are left.
      devices: by default all of this process group.

    Raises:
      ValueError: the product is not the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    model = max(len(devices) // data, 1) if model is None else model
    if data * model != len(devices):
        raise ValueError(
            f"data={data} times model={model} is not the number of devices, {len(devices)}: pass two factors of it, "
            "or devices="
        )
    # Named on purpose: the default of axis_types has changed between versions of jax.
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=devices)


def shardings(model: LinenModel, mesh: Mesh, rules: Mapping[str, str | None] = RULES) -> Any:
    """A tree of `NamedSharding` like the parameters of `model`.

    Args:
      model: a Linen module whose parameters name their axes; those that do not lie whole on every device.
      mesh: with the axes that `rules` names; one that it lacks is not used.
      rules: logical axis -> axis of the mesh.

    Raises:
      ValueError: a dimension that the mesh does not divide.
    """
    tokens = jnp.zeros((1, 1), jnp.int32)
    boxed = jax.eval_shape(model.module.init, jax.random.key(0), tokens, tokens)["params"]
    config = getattr(model.module, "config", None)
    # A projection is split between heads, never inside one.
    units = {name: getattr(config, f"num_{name}", 0) for name in ("heads", "kv_heads")}

    def place(path, spec, leaf):
        if spec is None:
            return NamedSharding(mesh, PartitionSpec())
        axes: list[str | None] = []
        for name, size in zip((*spec, *[None] * (len(leaf.shape) - len(spec))), leaf.shape, strict=True):
            axis = rules.get(name or "")
            parts = mesh.shape.get(axis or "", 1)
            count = math.gcd(units.get(name or "", 0), size)
            if count % parts and name not in _INDIVISIBLE:
                raise ValueError(
                    f"{jax.tree_util.keystr(path)} has {count} {name}, which {parts} devices along the mesh axis "
                    f"{axis!r} do not divide, and {math.gcd(count, parts)} would: take a smaller axis, or pass "
                    f"rules={{**RULES, {name!r}: None}}"
                )
            axes.append(axis if parts > 1 and count % parts == 0 else None)
        return NamedSharding(mesh, PartitionSpec(*axes))

    leaves = nn.meta.unbox(boxed)
    return jax.tree_util.tree_map_with_path(
        place, nn.get_partition_spec(boxed), leaves, is_leaf=lambda x: x is None or isinstance(x, PartitionSpec)
    )


def lay(model: Any, params: Any, mesh: Mesh, rules: Mapping[str, str | None] = RULES) -> Any:
    """`params` on the devices of `mesh`, as `shardings` says; those of a model that names no axes whole on each.

    Raises:
      ValueError: a dimension that the mesh does not divide, or parameters in int8.
    """
    if mesh_of(params) == mesh:
        return params
    if not isinstance(model, LinenModel):
        return jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    at = shardings(model, mesh, rules)
    if jax.tree.structure(at) != jax.tree.structure(params):
        raise ValueError("quantised parameters name no axes: specjax.load(..., mesh=) first, and quantise then")
    return jax.device_put(params, at)


def beside(arrays: Any, mesh: Mesh | None) -> Any:
    """What does not lie on `mesh` yet, whole on each of its devices."""
    if mesh is None:
        return arrays
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda leaf: leaf if mesh_of(leaf) == mesh else jax.device_put(leaf, whole), arrays)


def mesh_of(arrays: Any) -> Mesh | None:
    """The mesh that they lie on; None where they lie on one device, or are being traced."""
    meshes: Any = (at.mesh for at in map(_named, jax.tree.leaves(arrays)) if at is not None)  # never abstract ones
    return next(meshes, None)


def is_split(arrays: Any) -> bool:
    """Does a device hold a part of one of them only?"""
    return any(at is not None and not at.is_fully_replicated for at in map(_named, jax.tree.leaves(arrays)))


def row_parts(mesh: Mesh | None, rules: Mapping[str, str | None] = RULES) -> int:
    """A batch is split into so many parts, and so must have a multiple of as many rows."""
    return 1 if mesh is None else mesh.shape.get(rules.get("batch") or "", 1)


def spread(state: Any, mesh: Mesh | None, split_heads: bool, rules: Mapping[str, str | None] = RULES) -> Any:
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
    rows = rules.get("batch") if row_parts(mesh, rules) > 1 else None
    axis = rules.get("kv_heads")
    parts = mesh.shape.get(axis or "", 1) if split_heads else 1
    by_row = NamedSharding(mesh, PartitionSpec(rows) if rows else PartitionSpec())

    def place(leaf):
        at = by_row
        if isinstance(leaf, KVCache):
            if parts > 1 and leaf.keys[0].shape[1] % parts == 0:
                at = NamedSharding(mesh, PartitionSpec(rows, axis))
            leaf = dataclasses.replace(leaf, sharding=at)
            at = dataclasses.replace(jax.tree.map(lambda _: at, leaf), length=by_row)
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
    held = [x if at is None else jax.lax.with_sharding_constraint(x, at) for x, at in zip(leaves, layout, strict=True)]
    return jax.tree.unflatten(structure, held)


def _named(leaf: Any) -> NamedSharding | None:
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
        return None
    return leaf.sharding if isinstance(leaf.sharding, NamedSharding) else None
