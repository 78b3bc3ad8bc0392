"""`NoProposer`: plain autoregressive decoding, the baseline of every comparison."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from specjax._internal.checks import within
from specjax.contract import Arrays, Context, Proposer
from specjax.types import ABSENT, Proposal


@dataclasses.dataclass(frozen=True)
class NoProposer(Proposer):
    """Proposes only the root, padded with absent nodes to `num_nodes`.

    With the `num_nodes` of another proposer (num_drafts + 1 for a chain) the target runs the same
    program on the same shapes, so the two can be compared bit for bit, in bfloat16 too.
    """

    num_nodes: int = 1
    max_depth = 0
    is_chain = True
    point_mass = True

    def __post_init__(self) -> None:
        within("num_nodes", self.num_nodes, 1, note=", since it counts the root too")

    def truncate(self, state: tuple[()], count: Array, last: Array | None) -> tuple[()]:
        return state

    def propose(
        self, params: Arrays, state: tuple[()], context: Context
    ) -> tuple[Proposal, tuple[()]]:
        tokens = (
            jnp.zeros((len(context.pending), self.num_nodes), jnp.int32)
            .at[:, 0]
            .set(context.pending)
        )
        return Proposal(tokens, jnp.full_like(tokens, ABSENT), point_mass=True), state
