"""Shards a model's parameters and a decoder's state over a mesh of devices.

Every parameter of a Linen module names its axes (`flax.linen.with_logical_partitioning`); `RULES`
maps those names to the axes of a mesh.  `jax.jit` then partitions a program by the shardings of its
arguments.

A state is split by row, and the heads of a KV cache are split like the projections that make them.
So a step moves activations between devices, but no weights and no caches.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.caches import KVCache, LayerState
from specjax.contract import Model
from specjax.models import LinenModel, Transformer
from specjax.parallel.meshes import alike, automatic, with_kv_copies
from specjax.types import Weights

_T = TypeVar("_T")


Shardings: TypeAlias = Mapping[str, "NamedSharding | Shardings"]
"""A sharding for each parameter of a network, by the names of its layers."""

Specs: TypeAlias = Mapping[str, "PartitionSpec | Specs | None"]
"""The logical axes of each parameter of a network; None, also for several of them: replicated."""

Rules = Mapping[str, str | tuple[str, ...] | None]


class Indivisible(ValueError):
    """Raised where a mesh does not divide the heads or the sizes of a model's layers."""


RULES: Rules = {
    "batch": ("data", "fsdp"),
    "vocab": ("model", "kv_copies"),
    "heads": ("model", "kv_copies"),
    "kv_heads": "model",
    "states": ("model", "kv_copies"),
    "mlp": ("model", "kv_copies"),
    "expert_mlp": ("model", "kv_copies"),
    "features": ("model", "kv_copies"),
}
"""The axis of the mesh for each logical axis; other axes are not split.

This is Megatron's split (Shoeybi et al. 2019, arXiv 1909.08053, section 3): the first matrix of a
branch is split by columns and the second by rows, so that a branch costs one sum over the devices.
Devices along `kv_copies` have the same key heads, and other query heads: for a model with fewer key
heads than devices.  `features` are hidden states of a target that a drafter reads.
"""

TRAINING_RULES: Rules = {**RULES, "embed": "fsdp"}
"""The rules of training.

Each device along `fsdp` holds a shard of every parameter, gradient and optimizer state, and gathers
the parameters of a layer when it reads them (Rajbhandari et al. 2019, arXiv 1910.02054, section
5.3).
"""

_INDIVISIBLE = ("kv_heads", "states", "vocab", "features")
"""Axes that are not split if the mesh does not divide their size; other axes are then refused.

An embedding or an output matrix whose "vocab" is not split is split along "embed" instead.
"""


def shardings(model: LinenModel, mesh: Mesh, rules: Rules = RULES) -> Shardings:
    """Returns a tree of `NamedSharding` like the parameters of `model`.

    Args:
      model: a Linen module whose parameters name their axes; others are replicated.
      mesh: with the axes that `rules` names; a rule for an axis that it lacks has no effect.
      rules: logical axis -> axis of the mesh.

    Raises:
      ValueError: a dimension that the mesh does not divide.
    """
    tokens = jnp.zeros((1, 1), jnp.int32)
    units = {}
    if isinstance(model.module, Transformer):
        c = model.module.config
        units = {"heads": c.num_heads, "kv_heads": c.common_kv_heads}
        if parts := math.gcd(*(mixer.units() for mixer in c.mixers if mixer)):
            units["states"] = parts
    return module_shardings(model.module, mesh, rules, tokens, tokens, units=units)


def module_shardings(
    module: nn.Module,
    mesh: Mesh,
    rules: Rules,
    *inputs: Array,
    units: Mapping[str, int] | None = None,
) -> Shardings:
    """Returns the `shardings` of any Linen module, which is called with `inputs`.

    `units` are the numbers of equal parts of logical axes that are never split inside, such as
    heads.
    """
    boxed = jax.eval_shape(module.init, jax.random.key(0), *inputs)["params"]
    return named_shardings(nn.get_partition_spec(boxed), nn.meta.unbox(boxed), mesh, rules, units)


def named_shardings(
    names: Specs,
    shapes: Weights,
    mesh: Mesh,
    rules: Rules = RULES,
    units: Mapping[str, int] | None = None,
) -> Shardings:
    """Returns the `shardings` of arrays whose axes are named.

    Args:
      names: a tree like `shapes` with a PartitionSpec of logical axes for each array; None, also in
        place of a subtree, means replicated.
      shapes: the arrays, or their shapes.
      mesh, rules: as for `shardings`.
      units: as for `module_shardings`.

    Raises:
      ValueError: a dimension that the mesh does not divide.
    """
    parts_of, mesh = units or {}, automatic(mesh)

    def sharding_of(
        path: jax.tree_util.KeyPath, spec: PartitionSpec | None, leaf: Array
    ) -> NamedSharding | Shardings:
        if spec is None:
            return jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), leaf)
        axes: list[str | tuple[str, ...] | None] = []
        for name, size in zip(
            (*spec, *[None] * (len(leaf.shape) - len(spec))), leaf.shape, strict=True
        ):
            axis = _axes(mesh, rules.get(name or ""))
            parts = _size(mesh, axis)
            count = math.gcd(parts_of.get(name or "", 0), size)
            if count % parts and name not in _INDIVISIBLE:
                raise Indivisible(
                    f"{jax.tree_util.keystr(path)} has {count} {name}, which do not divide among "
                    f"{parts} devices along the mesh axis {', '.join(axis)}: use "
                    f"{math.gcd(count, parts)} devices along it, or pass "
                    f"rules={{**RULES, {name!r}: None}}"
                )
            axes.append(_entry(axis) if count % parts == 0 else None)
        if {"vocab", "embed"} <= {*spec} and axes[spec.index("vocab")] is None:
            # JAX splits no axis unevenly, and a whole copy of a model's largest matrices is dear.
            at = spec.index("embed")
            both = {*_axes(mesh, rules.get("embed")), *_axes(mesh, rules.get("vocab"))}
            wide = tuple(axis for axis in mesh.axis_names if axis in both)
            if leaf.shape[at] % _size(mesh, wide) == 0:
                axes[at] = _entry(wide)
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree_util.tree_map_with_path(
        sharding_of,
        names,
        shapes,
        is_leaf=lambda x: x is None or isinstance(x, PartitionSpec),
    )


def shard_params(model: Model, params: _T, mesh: Mesh, rules: Rules = RULES) -> _T:
    """Puts `params` onto the devices of `mesh`.

    The parameters of a `LinenModel` are sharded by `shardings`, on the mesh that `fitted` returns;
    those of other models are replicated.

    Raises:
      ValueError: a dimension that the mesh does not divide, or parameters in int8.
    """
    on = mesh_of(params)
    if on is not None and alike(on, mesh) and automatic(on) is on:
        return params
    if not isinstance(model, LinenModel):
        return replicate(params, mesh)
    at = shardings(model, fitted(mesh, model, rules), rules)
    if jax.tree.structure(at) != jax.tree.structure(params):
        raise ValueError(
            "quantised parameters have no axis names: load the model with specjax.load(..., mesh=) "
            "first, then quantise it"
        )
    return jax.tree.map(put, params, at)


def fitted(mesh: Mesh, model: LinenModel, rules: Rules = RULES) -> Mesh:
    """Returns the mesh for a model, with copies of its key heads if there are too few of them.

    Other rules than `RULES` define the split themselves, and leave the mesh as it is.
    """
    if rules is not RULES or not isinstance(model.module, Transformer):
        return mesh
    return with_kv_copies(mesh, model.module.config.common_kv_heads)


def replicate(arrays: _T, mesh: Mesh | None) -> _T:
    """Puts `arrays` onto `mesh`: those that are not on it yet are replicated over its devices."""
    if mesh is None:
        return arrays
    full = NamedSharding(automatic(mesh), PartitionSpec())

    def moved(leaf: Array) -> Array:
        on = mesh_of(leaf)
        same = on is not None and alike(on, mesh) and automatic(on) is on
        return leaf if same else put(leaf, full)

    return jax.tree.map(moved, arrays)


def put(array: Array | np.ndarray, at: NamedSharding) -> Array:
    """Puts an array, which every process has in full, onto devices of one or several processes."""
    if at.is_fully_addressable:
        return jax.device_put(array, at)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, at, lambda index: host[index], host.dtype)


def leader() -> bool:
    """Returns whether this is the process that prints and writes files."""
    return jax.process_index() == 0


@overload
def to_host(arrays: Array | np.ndarray) -> np.ndarray: ...
@overload
def to_host(arrays: tuple[Array, ...]) -> tuple[np.ndarray, ...]: ...
@overload
def to_host(arrays: object) -> Any: ...
def to_host(arrays: object) -> Any:
    """Returns a tree as NumPy arrays, in full in every process.

    All processes must call, since each sends its shards to the others.
    """

    def fetch(leaf: Array | np.ndarray) -> np.ndarray:
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
            return np.asarray(leaf)
        at = _named(leaf)
        assert at is not None  # only these shardings span several processes
        return np.asarray(_gather(NamedSharding(at.mesh, PartitionSpec()))(leaf))

    return jax.tree.map(fetch, arrays)


@functools.cache
def _gather(replicated: NamedSharding) -> Callable[[Array], Array]:
    return jax.jit(lambda x: x, out_shardings=replicated)


def mesh_of(arrays: object) -> Mesh | None:
    """Returns the mesh that the arrays are on; None if they are on one device, or traced."""
    shardings = map(_named, jax.tree.leaves(arrays))
    meshes = (at.mesh for at in shardings if at is not None and isinstance(at.mesh, Mesh))
    return next(meshes, None)


def is_split(arrays: object) -> bool:
    """Returns whether at least one of the arrays is split over devices, and not replicated."""
    return any(
        at is not None and not at.is_fully_replicated for at in map(_named, jax.tree.leaves(arrays))
    )


def row_parts(mesh: Mesh | None, rules: Rules = RULES) -> int:
    """Returns the number of shards of a batch; the number of rows must be a multiple of it."""
    return 1 if mesh is None else _size(mesh, _axes(mesh, rules.get("batch")))


def by_row(mesh: Mesh, rules: Rules = RULES) -> NamedSharding:
    """Returns the sharding of arrays whose axis 0 is the row."""
    rows, mesh = _axes(mesh, rules.get("batch")), automatic(mesh)
    return NamedSharding(mesh, PartitionSpec(_entry(rows)) if rows else PartitionSpec())


def shard_state(state: _T, mesh: Mesh | None, split_heads: bool, rules: Rules = RULES) -> _T:
    """Shards a new state over a mesh, inside a jitted function.

    Every leaf is split by row, and the layers of a KV cache and the states of layers by head too.

    Args:
      state: of a decoder, or a subtree of its state; the number of rows is a multiple of
        `row_parts`.
      mesh: None leaves the state as it is.
      split_heads: True if the model's parameters are split by head.  If the devices do not divide
        the number of heads, the heads of the cache are not split.
      rules: as for `shardings`.
    """
    if mesh is None:
        return state
    rows = by_row(mesh, rules)

    def split(rule: str, *sizes: int) -> NamedSharding:
        return _by_head(mesh, rows, rule if split_heads else None, sizes, rules)

    def shard(leaf: KVCache | LayerState | Array) -> KVCache | LayerState | Array:
        at: NamedSharding | KVCache | LayerState = rows
        if isinstance(leaf, KVCache):
            heads = split("kv_heads", *(x.shape[1] for x in leaf.keys))
            leaf = dataclasses.replace(leaf, sharding=heads)
            # A table of pages is split by row, as the length.
            at = jax.tree.map(lambda x: heads if x.ndim == 4 else rows, leaf)
        elif isinstance(leaf, LayerState):
            sizes = [x.shape[2] for x in leaf.columns]
            sizes += [] if leaf.state is None else [leaf.state.shape[1]]
            leaf = dataclasses.replace(leaf, sharding=split("states", *sizes))
            columns, whole = leaf.shardings
            at = jax.tree.map(lambda x: columns if x.ndim == 3 else whole, leaf)
        return jax.lax.with_sharding_constraint(leaf, at)

    return jax.tree.map(shard, state, is_leaf=is_memory)


def shard_pages(pools: _T, mesh: Mesh | None, split_heads: bool, rules: Rules = RULES) -> _T:
    """Shards the pages [P, K, page, D] of caches by head, inside a jitted function.

    All rows share them, so each device along the axis of rows holds all pages.
    """
    if mesh is None:
        return pools
    mesh = automatic(mesh)
    whole, rule = NamedSharding(mesh, PartitionSpec()), "kv_heads" if split_heads else None
    sizes = [x.shape[1] for x in jax.tree.leaves(pools)]
    at = _by_head(mesh, whole, rule, sizes, rules)
    return jax.lax.with_sharding_constraint(pools, jax.tree.map(lambda _: at, pools))


def _by_head(
    mesh: Mesh, rows: NamedSharding, rule: str | None, sizes: Sequence[int], rules: Rules
) -> NamedSharding:
    """Returns `rows` with axis 1 split by a rule, if the devices divide these sizes."""
    axis = () if rule is None else _axes(mesh, rules.get(rule))
    parts = _size(mesh, axis)
    if parts == 1 or any(size % parts for size in sizes):
        return rows
    return NamedSharding(rows.mesh, PartitionSpec(*(rows.spec or (None,)), _entry(axis)))


def is_memory(x: object) -> bool:
    """Returns whether `x` is a cache whose parts are split in ways of their own."""
    return isinstance(x, KVCache | LayerState)


def layout(state: object) -> tuple[NamedSharding | None, ...] | None:
    """Returns the sharding of each leaf, hashable, for `constrain_like`; None without a mesh."""
    leaves = tuple(map(_named, jax.tree.leaves(state)))
    return leaves if any(leaves) else None


def constrain_like(state: _T, layout: tuple[NamedSharding | None, ...] | None) -> _T:
    """Returns `state` with the shardings in `layout`, inside a jitted function.

    Otherwise XLA may choose another sharding, and then cannot reuse a donated buffer.
    """
    if layout is None:
        return state
    leaves, structure = jax.tree.flatten(state)
    held = [
        x if at is None else jax.lax.with_sharding_constraint(x, at)
        for x, at in zip(leaves, layout, strict=True)
    ]
    return jax.tree.unflatten(structure, held)


def _axes(mesh: Mesh, rule: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the axes of a rule along which the mesh has more than one device."""
    return tuple(
        axis
        for axis in ((rule,) if isinstance(rule, str) else rule or ())
        if mesh.shape.get(axis, 1) > 1
    )


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """Returns axes as an entry of a PartitionSpec, in one normal form."""
    return axes if len(axes) > 1 else axes[0] if axes else None


def _size(mesh: Mesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _named(leaf: object) -> NamedSharding | None:
    """Returns the sharding of an array, or of the shape of one, on a mesh."""
    sharding = getattr(leaf, "sharding", None)
    # Most arrays have no mesh, and the test for a tracer is slow: so it comes last.
    return None if not isinstance(sharding, NamedSharding) or isinstance(leaf, Tracer) else sharding
