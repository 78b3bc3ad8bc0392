"""Verification: the target's pass over a proposal, and what it says."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.contract import Cache, Model, Proposer
from specjax.tree import Tree
from specjax.types import ABSENT, Arrays, ModelOutput, Proposal, Verdict


@struct.dataclass
class Verification:
    """What a pass of the target says about a proposal.

    It is the result of `Decoder.verify`, which `Decoder.commit` takes.
    """

    verdict: Verdict  # of each row
    tree: Tree  # of each row, without drafts that are deeper than the row's `num_drafts`
    output: ModelOutput  # of the target's pass; the proposal is staged in its cache
    logits: Array  # [B, N, V] float32; the target's warped logits after each node


def read_proposal(
    target: Model,
    proposer: Proposer,
    params: Arrays,
    cache: Cache,
    proposal: Proposal,
    tree: Tree,
) -> ModelOutput:
    """The target's pass over a proposal.

    It reads the narrowest of the proposer's widths that holds the drafts of all rows; the results
    of the other nodes are 0.
    """
    num_nodes, taps = proposal.tokens.shape[1], proposer.taps
    positions = cache.length[:, None] + tree.depth

    def read(width: int, cache: Cache) -> ModelOutput:
        seen = None if proposer.is_chain else tree.ancestors[:, :width, :width]
        tokens, at = proposal.tokens[:, :width], positions[:, :width]
        if taps:
            out = target.apply(params, tokens, at, cache, seen, taps=taps)
        else:  # a model without taps may lack the parameter
            out = target.apply(params, tokens, at, cache, seen)
        if width == num_nodes:
            return out
        padded = jax.tree.map(
            lambda x: jnp.pad(x, ((0, 0), (0, num_nodes - width), (0, 0))),
            (out.logits, out.hidden, out.features),
        )
        return ModelOutput(padded[0], padded[1], out.cache, padded[2])

    # Without scratch the shape of a cache depends on the width of the last pass.
    if not (proposer.narrower and cache.keeps_scratch):
        return read(num_nodes, cache)
    widths = (*proposer.narrower, num_nodes)
    last = jnp.max(jnp.where(proposal.parent != ABSENT, jnp.arange(num_nodes), 0))
    chosen = jnp.searchsorted(jnp.array(widths), last + 1)
    shapes = jax.eval_shape(functools.partial(read, widths[0]), cache)
    logits, hidden, features = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), (shapes.logits, shapes.hidden, shapes.features)
    )
    empty = ModelOutput(logits, hidden, cache, features)

    # Loops of at most one iteration instead of branches: XLA copies the cache that a branch
    # returns, but updates a loop's carry in place.
    def read_if(wanted: Array, width: int, before: ModelOutput) -> ModelOutput:
        def turn(carry: tuple[Array, ModelOutput]) -> tuple[Array, ModelOutput]:
            return jnp.zeros_like(wanted), read(width, carry[1].cache)

        return jax.lax.while_loop(lambda carry: carry[0], turn, (wanted, before))[1]

    output = empty
    for index, width in enumerate(proposer.narrower):
        with jax.named_scope("fewer_drafts"):
            output = read_if(chosen == index, width, output)
    return read_if(chosen == len(proposer.narrower), num_nodes, output)
