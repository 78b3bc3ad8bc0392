"""The state of a recurrent layer, from which rejected drafts never have to be removed.

    committed            S0, and the last inputs of the convolutions
    staged by a pass     for each of its N nodes: a key, an update, a sum of gates, and its inputs
    commit(path)         S = e^G S0 + sum over the path of e^(G - G_j) k_j u_j^T

A pass over N nodes of a tree computes what the recurrence along each branch would compute, without
the state after each node (`models.mixers.outer_products` derives it).  So a pass stages
N (Dk + Dv + 1) numbers a head instead of N Dk Dv, and a node that is not on the path is not added.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec


@struct.dataclass
class Staged:
    """What a pass over N nodes adds, if its nodes are committed."""

    inputs: tuple[Array, ...]  # of each convolution: [B, N, C]
    # Of the state; None if the layer has only convolutions.
    keys: Array | None = None  # [B, N, K, Dk]; H is a multiple of K
    updates: Array | None = None  # [B, N, H, Dv]
    # [B, N, H] or, with a gate for each channel, [B, N, H, Dk]: the sum of the logarithms of the
    # gates along the path to a node, its own included.
    totals: Array | None = None
    # Instead of `totals`, where a state is updated token by token: the logarithms themselves.
    gates: Array | None = None


@struct.dataclass
class LayerState:
    """The state of one layer after the committed tokens, and what the last pass staged.

    `state` is a sum of outer products that decays (linear attention), and `columns` are the last
    inputs of short causal convolutions.
    """

    columns: tuple[Array, ...]  # of each convolution over K tokens: [B, K - 1, C], the oldest first
    state: Array | None = None  # [B, H, Dk, Dv] float32; None if it has only convolutions
    staged: Staged | None = None
    # Of `state`, and of the channels of `columns`, on a mesh; None on one device.
    sharding: NamedSharding | None = struct.field(pytree_node=False, default=None)

    @property
    def shardings(self) -> tuple[NamedSharding, NamedSharding]:
        """The shardings of the columns and of the state, on a mesh."""
        at = self.sharding
        assert at is not None
        rows, heads = (*at.spec, None, None)[:2]
        return NamedSharding(at.mesh, PartitionSpec(rows, None, heads)), at

    def stage(self, staged: Staged) -> LayerState:
        """Returns this state with the additions of a pass."""
        return dataclasses.replace(self, staged=staged)

    def commit(self, count: Array, path: Array | None = None) -> LayerState:
        """Returns the state after `count` [B] staged nodes: those at `path` [B, T], or the first.

        The nodes of a path are a branch, the root first.
        """
        staged = self.staged
        if staged is None:
            raise ValueError("nothing is staged: a mixer must return memory.stage(...)")
        if path is not None:
            staged = jax.tree.map(lambda x: _at(x, path), staged)
        columns = tuple(
            _last(old, new, count) for old, new in zip(self.columns, staged.inputs, strict=True)
        )
        state, keys, updates, totals = self.state, staged.keys, staged.updates, staged.totals
        if state is not None:
            assert keys is not None and updates is not None
            if staged.gates is not None:
                kept = jnp.arange(keys.shape[1]) < count[:, None]
                state = replayed(state, keys, updates, staged.gates, kept)
            else:
                assert totals is not None
                state = advanced(state, keys, updates, totals, count)
        return dataclasses.replace(self, columns=columns, state=state, staged=None)

    def widened(self, width: int) -> LayerState:
        """Returns this state as if `width` nodes were staged; those that are added are zeros."""

        def pad(x: Array) -> Array:
            return jnp.pad(x, ((0, 0), (0, width - x.shape[1]), *[(0, 0)] * (x.ndim - 2)))

        return dataclasses.replace(self, staged=jax.tree.map(pad, self.staged))

    def staged_as(self, shapes: LayerState) -> LayerState:
        """Returns this state with zeros staged, in the shapes of `shapes`."""
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes.staged)
        return dataclasses.replace(self, staged=zeros)

    def rewind(self, to: LayerState) -> LayerState:
        """Returns `to`: a state is not rewound, but kept."""
        return dataclasses.replace(to, staged=None)


def _at(x: Array, path: Array) -> Array:
    """Returns [B, T, ...], the rows `path` [B, T] of `x` [B, N, ...]."""
    return jnp.take_along_axis(x, path.reshape(*path.shape, *[1] * (x.ndim - 2)), axis=1)


def _last(old: Array, new: Array, count: Array) -> Array:
    """Returns the last K - 1 of the columns `old` [B, K - 1, C] and the first `count` of `new`."""
    every = jnp.concatenate([old, new.astype(old.dtype)], axis=1)
    return jax.vmap(lambda row, n: jax.lax.dynamic_slice_in_dim(row, n, old.shape[1]))(every, count)


def advanced(state: Array, keys: Array, updates: Array, totals: Array, count: Array) -> Array:
    """Returns e^G S + sum over j < count of e^(G - G_j) k_j u_j^T, where G is G_(count - 1).

    The exponents are differences, so none is above 0.  The sum is one product for each head.

    Args:
      state: S, [B, H, Dk, Dv] float32.
      keys, updates, totals: k [B, T, K, Dk], u [B, T, H, Dv] and G, as in `Staged`, along a branch.
      count: [B].
    """
    keys = jnp.repeat(keys, state.shape[1] // keys.shape[2], axis=2)
    if totals.ndim == 3:
        totals = totals[..., None]  # one gate for all channels of a key
    last = jnp.maximum(count - 1, 0)
    total = jnp.take_along_axis(totals, last[:, None, None, None], axis=1)
    kept = jnp.arange(totals.shape[1]) < count[:, None]
    weights = jnp.where(kept[..., None, None], jnp.exp(total - totals), 0.0)
    decay = jnp.where(count[:, None, None] > 0, jnp.exp(total[:, 0]), 1.0)
    added = jnp.einsum("bnhk,bnhv->bhkv", keys * weights, updates, precision="highest")
    return decay[..., None] * state + added


def replayed(state: Array, keys: Array, updates: Array, gates: Array, kept: Array) -> Array:
    """Returns the state after the nodes of a branch, each of which is added to the one before.

    The operations on a node are the same whatever the other nodes are, so the state has the bits
    of a state that was advanced by one node at a time.

    Args:
      state: [B, H, Dk, Dv] float32.
      keys, updates, gates: of N nodes, as in `Staged`.
      kept: [B or 1, N] bool, whether a node is on the branch.
    """
    keys = jnp.repeat(keys, state.shape[1] // keys.shape[2], axis=2)
    kept = jnp.broadcast_to(kept, keys.shape[:2])

    def add(state: Array, node: tuple[Array, ...]) -> tuple[Array, None]:
        *added, is_kept = node
        return jnp.where(is_kept[:, None, None, None], with_node(state, *added), state), None

    nodes = [x.swapaxes(0, 1) for x in (keys, updates, gates, kept)]
    return jax.lax.scan(add, state, tuple(nodes))[0]


def with_node(state: Array, key: Array, update: Array, gate: Array) -> Array:
    """Returns e^g S + k u^T.

    Args:
      state: S, [B, H, Dk, Dv] float32.
      key, update, gate: k [B, H, Dk], u [B, H, Dv] and g [B, H] or [B, H, Dk].
    """
    return decayed(state, gate) + key[..., None] * update[:, :, None]


def decayed(state: Array, gate: Array) -> Array:
    """Returns e^g S; the arguments are those of `with_node`."""
    gate = gate[..., None] if gate.ndim == 3 else gate[..., None, None]
    return jnp.exp(gate) * state
