"""`Resting`: a proposer in steps in which it neither looks for drafts nor chooses."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from specjax.contract.proposer import Context
from specjax.contract.variables import ParamsT, StateT
from specjax.contract.wrapper import Wrapper
from specjax.types import ABSENT, Block, Proposal


@dataclasses.dataclass(frozen=True)
class Resting(Wrapper[ParamsT, StateT, ParamsT]):
    """Proposes only the root; `inner` takes what is committed, as `Proposer.lapse` says."""

    def __post_init__(self) -> None:
        self.declare_like(
            num_nodes=1, max_depth=0, is_chain=True, narrower=(), estimates=False, point_mass=True
        )

    def propose(self, params: ParamsT, state: StateT, context: Context) -> tuple[Proposal, StateT]:
        tokens = context.pending[:, None]
        return Proposal(tokens, jnp.full_like(tokens, ABSENT), point_mass=True), state

    def observe(self, params: ParamsT, state: StateT, block: Block) -> StateT:
        return self.inner.lapse(self.own(params), state, block)
