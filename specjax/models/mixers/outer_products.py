"""Reads the nodes of a tree into a decaying sum of outer products, without a state for each node.

    recurrence   S_i = e^g_i S_p + k_i u_i^T          o_i = S_i^T q_i
    delta rule   u_i = b_i (v_i - (e^g_i S_p)^T k_i)   else u_i = v_i

p is the parent of node i (the committed state S_0 for a root), and G_i the sum of g from the root
to i.  Unrolled along the ancestors A(i), the recurrence is

    S_i = e^G_i S_0 + sum over j in A(i) and i of e^(G_i - G_j) k_j u_j^T

so with K, V, U of all nodes as rows the delta rule is one unit-triangular system a head,

    (I + L) U = b (V - e^G K S_0),    L_ij = b_i e^(G_i - G_j) (k_i . k_j)  for j in A(i)

and the outputs are  o_i = e^G_i S_0^T q_i + sum of e^(G_i - G_j) (q_i . k_j) u_j.  The exponents
are formed as differences, and none is above 0, since g <= 0.

Reference: Yang et al. 2024 (gated delta networks), arXiv 2412.06464, equations 10 and 11, where the
ancestors are all earlier tokens.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

from specjax.caches import LayerState, Staged, advanced, decayed, replayed, with_node
from specjax.models.mixers import unit_triangular

BLOCK = 64
"""Tokens of a text whose system is solved at once; the state is carried from block to block."""

_einsum = functools.partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)


def read(
    state: Array,
    query: Array,
    key: Array,
    value: Array,
    gate: Array,
    beta: Array | None = None,
    ancestors: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Reads N nodes after the committed state.

    Args:
      state: [B, H, Dk, Dv] float32, S_0.
      query, key: [B, N, K, Dk]; H is a multiple of K, and head h reads key head h // (H / K).
      value: [B, N, H, Dv].
      gate: [B, N, H], the logarithms g <= 0; or [B, N, H, Dk], one for each channel of a key.
      beta: [B, N, H] of the delta rule; None: u is v.
      ancestors: [B or 1, N, N] bool, of each node, itself included; None: each node is the child of
        the node before it.

    Returns:
      The outputs [B, N, H, Dv], the updates u of the same shape, and the totals G, like `gate`; all
      float32.
    """
    heads = state.shape[1]
    query, key, value, gate = (x.astype(jnp.float32) for x in (query, key, value, gate))
    query, key = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (query, key))
    beta = None if beta is None else beta.astype(jnp.float32)
    width = key.shape[1]
    if ancestors is not None or width <= BLOCK:
        total = _totals(gate, ancestors)
        return *_solved(state, query, key, value, total, beta, ancestors), total
    return *_in_blocks(state, query, key, value, gate, beta), _totals(gate, None)


def read_in_turn(
    state: Array,
    query: Array,
    key: Array,
    value: Array,
    gate: Array,
    beta: Array | None = None,
    ancestors: Array | None = None,
) -> tuple[Array, Array]:
    """Computes `read` by the recurrence, one node after the other.

    Before each node the state is built anew from the committed one, by the operations with which
    `caches.layer_state.replayed` commits.  So a node gives the same bits at any place of any tree,
    and no state is kept for it; N nodes cost N^2 updates of a state.  A text longer than `BLOCK` is
    read in N updates.

    Returns:
      The outputs [B, N, H, Dv] and the updates, as `read`.
    """
    heads = state.shape[1]
    query, key, value, gate = (x.astype(jnp.float32) for x in (query, key, value, gate))
    query, key = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (query, key))
    betas = jnp.ones(gate.shape[:3], jnp.float32) if beta is None else beta.astype(jnp.float32)
    nodes = tuple(x.swapaxes(0, 1) for x in (query, key, value, gate, betas))

    def one(before: Array, node: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        """Returns the state after a node, its output and its update."""
        query, key, update, gate, rate = node
        if beta is not None:
            seen = _einsum("bhk,bhkv->bhv", key, decayed(before, gate))
            update = rate[..., None] * (update - seen)
        after = with_node(before, key, update, gate)
        return after, _einsum("bhk,bhkv->bhv", query, after), update

    def turn(state: Array, node: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        state, out, update = one(state, node)
        return state, (out, update)

    width = key.shape[1]
    if ancestors is None and width > BLOCK:
        made = jax.lax.scan(turn, state, nodes)[1]
        return made[0].swapaxes(0, 1), made[1].swapaxes(0, 1)
    if ancestors is None:
        ancestors = jnp.tril(jnp.ones((1, width, width), bool))
    strict = ancestors & ~jnp.eye(width, dtype=bool)

    def anew(updates: Array, node: tuple[Array, ...]) -> tuple[Array, Array]:
        at, kept, *own = node
        _, out, update = one(replayed(state, key, updates, gate, kept), tuple(own))
        return updates.at[:, at].set(update), out

    inputs = jnp.arange(width), strict.swapaxes(0, 1), *nodes
    updates, outputs = jax.lax.scan(anew, jnp.zeros_like(value), inputs)
    return outputs.swapaxes(0, 1), updates


def stage_read(
    memory: LayerState,
    inputs: tuple[Array, ...],
    query: Array,
    key: Array,
    value: Array,
    gate: Array,
    beta: Array | None,
    ancestors: Array | None,
    in_turn: bool,
) -> tuple[Array, LayerState]:
    """Reads N nodes after a layer's state, and stages them.

    Args:
      memory: of the layer.
      inputs: of its convolutions.
      query, key, value, gate, beta, ancestors: as for `read`.
      in_turn: read them by `read_in_turn`.

    Returns:
      The outputs [B, N, H, Dv], and the memory.
    """
    state = memory.state
    assert state is not None
    if in_turn:
        out, updates = read_in_turn(state, query, key, value, gate, beta, ancestors)
        key, gate = key.astype(jnp.float32), gate.astype(jnp.float32)
        return out, memory.stage(Staged(inputs, key, updates, gates=gate))
    out, updates, totals = read(state, query, key, value, gate, beta, ancestors)
    return out, memory.stage(Staged(inputs, key, updates, totals))


def _totals(gate: Array, ancestors: Array | None) -> Array:
    if ancestors is None:
        return jnp.cumsum(gate, axis=1)
    seen = jnp.broadcast_to(ancestors, (len(gate), *ancestors.shape[1:])).astype(jnp.float32)
    return _einsum("bij,bj...->bi...", seen, gate)


def _solved(
    state: Array,
    query: Array,
    key: Array,
    value: Array,
    total: Array,
    beta: Array | None,
    ancestors: Array | None,
) -> tuple[Array, Array]:
    """Returns the outputs and updates of nodes that are read at once; `total` is G."""
    width = key.shape[1]
    with_self = jnp.tril(jnp.ones((1, width, width), bool)) if ancestors is None else ancestors
    within = with_self[:, None]  # [B or 1, 1, N, N]
    by_channel = total.ndim == 4
    grown = jnp.exp(total) if by_channel else jnp.exp(total)[..., None]
    # Keys and queries are multiplied together: the state is read once.
    readers = (query,) if beta is None else (key, query)

    def parts(x: Array, axis: int) -> list[Array]:
        return jnp.split(x, len(readers), axis)

    every = jnp.concatenate([grown * x for x in readers], axis=1)
    *known, out = parts(_einsum("bnhk,bhkv->bnhv", every, state), 1)
    if by_channel:
        apart = jnp.where(
            with_self[:, :, :, None, None], total[:, :, None] - total[:, None], -jnp.inf
        )
        decay = jnp.exp(apart)  # [B, N, N, H, Dk]
        scores = [_einsum("bihk,bijhk,bjhk->bhij", x, decay, key) for x in readers]
    else:
        by_head = total.swapaxes(1, 2)
        apart = jnp.where(within, by_head[..., None] - by_head[:, :, None], -jnp.inf)
        decay = jnp.exp(apart)  # [B, H, N, N]
        products = _einsum("bihk,bjhk->bhij", jnp.concatenate(readers, axis=1), key)
        scores = [decay * x for x in parts(products, 2)]
    update = value
    if beta is not None:
        update = beta[..., None] * (value - known[0])
        if width > 1:
            strict = within & ~jnp.eye(width, dtype=bool)
            lower = jnp.where(strict, scores[0], 0.0) * beta.swapaxes(1, 2)[..., None]
            update = unit_triangular.solve(lower, update.swapaxes(1, 2)).swapaxes(1, 2)
    inside = _einsum("bhij,bjhv->bihv", jnp.where(within, scores[-1], 0.0), update)
    return out + inside, update


def _in_blocks(
    state: Array, query: Array, key: Array, value: Array, gate: Array, beta: Array | None
) -> tuple[Array, Array]:
    """Computes `_solved` for a text, `BLOCK` tokens at a time."""
    rows, width = key.shape[:2]
    inputs = (query, key, value, gate) if beta is None else (query, key, value, gate, beta)

    def step(state: Array, part: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        query, key, value, gate, *rest = part
        total = jnp.cumsum(gate, axis=1)
        made = _solved(state, query, key, value, total, rest[0] if rest else None, None)
        count = jnp.full(rows, key.shape[1])
        return advanced(state, key, made[1], total, count), made

    whole = width // BLOCK * BLOCK

    def split(x: Array) -> Array:
        return x[:, :whole].reshape(rows, -1, BLOCK, *x.shape[2:]).swapaxes(0, 1)

    state, made = jax.lax.scan(step, state, tuple(map(split, inputs)))
    outputs = [x.swapaxes(0, 1).reshape(rows, whole, *x.shape[3:]) for x in made]
    if whole < width:
        _, last = step(state, tuple(x[:, whole:] for x in inputs))
        outputs = [jnp.concatenate(pair, axis=1) for pair in zip(outputs, last, strict=True)]
    return outputs[0], outputs[1]
