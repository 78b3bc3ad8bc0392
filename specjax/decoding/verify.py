"""Verification: the target's pass over a proposal, and what it says."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax._internal.control_flow import apply_if
from specjax.contract import Cache, Model, Proposer
from specjax.tree import Tree
from specjax.types import ABSENT, Arrays, ModelOutput, Proposal, Verdict

Made = tuple[Verdict, ModelOutput, Array]
"""Verdicts, the output of the target, and the warped logits."""


@struct.dataclass
class Verification:
    """What a pass of the target says about a proposal.

    It is the result of `Decoder.verify`, which `Decoder.commit` takes.
    """

    verdict: Verdict  # of each row
    tree: Tree  # of each row, without drafts that are deeper than the row's `num_drafts`
    output: ModelOutput  # of the target's pass; the proposal is staged in its cache
    logits: Array  # [B, N, V] float32; the target's warped logits after each node


def verify_narrowly(
    target: Model,
    proposer: Proposer,
    params: Arrays,
    cache: Cache,
    proposal: Proposal,
    tree: Tree,
    judge: Callable[[Proposal, Tree, Array], tuple[Verdict, Array]],
) -> Verification:
    """The target's pass over a proposal, and the rule's verdict.

    The target reads the narrowest of the proposer's widths that holds the drafts of all rows.  The
    rule, too, sees only these nodes; the results of the others are 0.

    Args:
      judge: from a proposal, its tree, and the target's logits after its nodes, to the verdicts and
        the warped logits.
    """
    num_nodes, taps = proposal.tokens.shape[1], proposer.taps
    positions = cache.length[:, None] + tree.depth

    def read(width: int, cache: Cache) -> Made:
        drafts = jax.tree.map(lambda x: x[:, :width], proposal)
        part = jax.tree.map(lambda x: x[:, :width], tree)
        part = part.replace(ancestors=part.ancestors[..., :width])
        seen = None if proposer.is_chain else part.ancestors
        out = target.apply(params, drafts.tokens, positions[:, :width], cache, seen, taps=taps)
        verdict, logits = judge(drafts, part, out.logits)
        if width == num_nodes:
            return verdict, out, logits
        padded = jax.tree.map(
            lambda x: jnp.pad(x, ((0, 0), (0, num_nodes - width), (0, 0))),
            (out.logits, out.hidden, out.features, logits),
        )
        return verdict, ModelOutput(padded[0], padded[1], out.cache, padded[2]), padded[3]

    # Without scratch the shape of a cache depends on the width of the last pass.
    if not (proposer.narrower and cache.keeps_scratch):
        verdict, output, logits = read(num_nodes, cache)
        return Verification(verdict, tree, output, logits)
    widths = (*proposer.narrower, num_nodes)
    last = jnp.max(jnp.where(proposal.parent != ABSENT, jnp.arange(num_nodes), 0))
    chosen = jnp.searchsorted(jnp.array(widths), last + 1)
    shapes = jax.eval_shape(functools.partial(read, widths[0]), cache)
    made = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), (shapes[0], shapes[1].replace(cache=None), shapes[2])
    )
    made = (made[0], made[1].replace(cache=cache), made[2])

    def reader(width: int) -> Callable[[Made], Made]:
        return lambda made: read(width, made[1].cache)

    for index, width in enumerate(proposer.narrower):
        with jax.named_scope("fewer_drafts"):
            made = apply_if(chosen == index, reader(width), made)
    verdict, output, logits = apply_if(chosen == len(proposer.narrower), reader(num_nodes), made)
    return Verification(verdict, tree, output, logits)
