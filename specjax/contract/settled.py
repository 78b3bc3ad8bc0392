"""`Settled`: a proposer in steps in which it drafts without a choice."""

from __future__ import annotations

import dataclasses

from specjax.contract.proposer import Context
from specjax.contract.variables import ParamsT, StateT
from specjax.contract.wrapper import Wrapper
from specjax.types import Proposal


@dataclasses.dataclass(frozen=True)
class Settled(Wrapper[ParamsT, StateT, ParamsT]):
    """Proposes by `Proposer.draft` of `inner`, and has one width for the target."""

    def __post_init__(self) -> None:
        self.declare_like(narrower=())

    def propose(self, params: ParamsT, state: StateT, context: Context) -> tuple[Proposal, StateT]:
        return self.inner.draft(self.own(params), state, context)
