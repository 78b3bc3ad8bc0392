"""Trees for the tests: the path up from a node, and a proposer whose trees change from step to
step."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax import LinenModel, Proposal, tree
from specjax.contract import Context, Proposer
from specjax.types import Block


def ancestors(parent: Any, node: int) -> list[int]:
    """The path from the root of its tree to `node`, found by walking up."""
    path = [node]
    while parent[path[0]] >= 0:
        path.insert(0, int(parent[path[0]]))
    return path


@struct.dataclass
class TreeState:
    tokens: Array  # [B, capacity]
    length: Array  # [B]


@dataclasses.dataclass(frozen=True)
class SampledTree(Proposer):
    """Trees for the decoder's general path: rows take turns through `shapes`, so parents are data.

    `model` rereads the whole text for every node, which is slow and needs no cache. Siblings are
    drawn without replacement, as the tokens of largest logit + noise.
    """

    model: LinenModel
    shapes: tuple[tuple[int, ...], ...]
    is_chain = False
    draws = True

    def __post_init__(self):
        deepest = max(
            len(ancestors(shape, n)) - 1 for shape in self.shapes for n in range(len(shape))
        )
        self.declare(num_nodes=len(self.shapes[0]), max_depth=deepest)

    def init(self, params: Any, prompt: Block, capacity: int) -> TreeState:
        rows, width = prompt.tokens.shape
        tokens = (
            jnp.zeros((rows, capacity + self.num_nodes), jnp.int32).at[:, :width].set(prompt.tokens)
        )
        return TreeState(tokens, prompt.count)

    def observe(self, params: Any, state: TreeState, block: Block) -> TreeState:
        write = jax.vmap(lambda text, new, at: jax.lax.dynamic_update_slice(text, new, (at,)))
        return TreeState(
            write(state.tokens, block.tokens, state.length), state.length + block.count
        )

    def propose(
        self, params: Any, state: TreeState, context: Context
    ) -> tuple[Proposal, TreeState]:
        pending, rows, nodes = context.pending, len(context.pending), self.num_nodes
        width = state.tokens.shape[1]
        parent = jnp.array(self.shapes)[state.length % len(self.shapes)]
        depth, mask = jax.vmap(tree.depth)(parent), jax.vmap(tree.ancestor_mask)(parent)
        slot = jnp.arange(width)
        text = jnp.broadcast_to(slot[:, None] >= slot, (rows, width, width))
        past = jnp.broadcast_to((slot < state.length[:, None])[:, None], (rows, nodes, width))
        visible = jnp.concatenate(
            [jnp.pad(text, ((0, 0), (0, 0), (0, nodes))), jnp.concatenate([past, mask], axis=2)],
            axis=1,
        )
        positions = jnp.concatenate(
            [jnp.broadcast_to(slot, (rows, width)), state.length[:, None] + depth], axis=1
        )

        texts = jax.vmap(functools.partial(tree.path_tokens, max_depth=self.max_depth))

        def read(tokens):
            everything = jnp.concatenate([state.tokens, tokens], axis=1)
            logits = self.model.apply(params, everything, positions, None, visible).logits[
                :, width:
            ]
            # Shared noise needs no distribution, and at temperature 0 a warped one has no second
            # best token.
            if context.shared_noise:
                return logits.astype(jnp.float32)
            return context.warp(logits, texts(tokens, parent))

        def one(n, tokens):
            up = parent[:, n]
            at = jnp.maximum(up, 0)
            scores = jnp.take_along_axis(read(tokens), at[:, None, None], axis=1)[:, 0]
            # Each row has another tree, and `context.noise` is for one tree in all rows.
            noise = jax.vmap(lambda d, node, deep: d.noise(node, deep)[0])(
                context.draw, at[:, None], jnp.take_along_axis(depth, at[:, None], axis=1)
            )
            sibling = (parent == up[:, None]) & (jnp.arange(nodes) < n)
            taken = (
                sibling[:, :, None] & (tokens[:, :, None] == jnp.arange(scores.shape[-1]))
            ).any(1)
            # Finite but lower than any score: siblings are distinct even if no token is left.
            best = jnp.argmax(
                jnp.where(taken, -jnp.inf, jnp.maximum(scores + noise, -1e30)), axis=-1
            )
            return tokens.at[:, n].set(best.astype(jnp.int32))

        tokens = jnp.zeros((rows, nodes), jnp.int32).at[:, 0].set(pending)
        tokens = jax.lax.fori_loop(1, nodes, one, tokens)
        return Proposal(tokens, parent, read(tokens) if context.wants_logits else None), state
