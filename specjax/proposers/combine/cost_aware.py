"""`CostAware`: leaves out drafts that would cost more time than they are expected to save."""

from __future__ import annotations

import dataclasses
from typing import Generic, TypeVar

import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax._internal.checks import settle
from specjax._internal.prefix_sums import running_sum
from specjax.contract import Context, Loaded, StateT, Wrapper
from specjax.proposers.combine.keeping import best_nodes, ranked
from specjax.types import Proposal

_InnerT = TypeVar("_InnerT")


@struct.dataclass
class CostAwareParams(Generic[_InnerT]):
    """Parameters of a `CostAware` proposer."""

    inner: _InnerT
    seconds: Array  # [W] of a step at each of `widths`, in any unit


@dataclasses.dataclass(frozen=True)
class CostAware(Wrapper[CostAwareParams[_InnerT], StateT, _InnerT]):
    """Keeps the best drafts of `inner`, in the number that gives the most tokens a second.

    A step with w nodes is expected to emit 1 + the sum of the chances of its w - 1 drafts, and
    takes `seconds` of that width.  Each row keeps the best nodes of the width at which the quotient
    is greatest.  The target then reads the narrowest width that holds the drafts of all rows.

    The chances are the drafter's estimates, `Proposal.chance`.  They depend only on the row, so a
    row's text does not depend on the rest of its batch.

    Attributes:
      inner: a proposer of trees that estimates chances, such as `BestFirst` or `DynamicTree`.
      widths: ascending numbers of nodes, the root included; the last is `inner.num_nodes`.
    """

    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        inner, widths = self.inner, self.widths
        settle(
            (
                not inner.estimates,
                f"a {type(inner).__name__} does not estimate the chances of its drafts: pass a "
                "BestFirst or a DynamicTree",
            ),
            (
                list(widths) != sorted({*widths, inner.num_nodes}) or widths[0] < 1,
                f"widths={widths}; pass ascending numbers of nodes from 1, the last of which is "
                f"{inner.num_nodes}, the nodes of the proposer",
            ),
        )
        self.declare_like(is_chain=False, narrower=widths[:-1], estimates=False, separable=False)

    def own(self, params: CostAwareParams[_InnerT]) -> _InnerT:
        return params.inner

    def bind(self, target: Loaded, draft: Loaded | None) -> CostAwareParams[_InnerT]:
        raise ValueError(
            "a CostAware has costs of its own: pass specjax.cost_aware(...) as drafter="
        )

    def propose(
        self, params: CostAwareParams[_InnerT], state: StateT, context: Context
    ) -> tuple[Proposal, StateT]:
        proposal, state = self.inner.propose(params.inner, state, context)
        best, place = ranked(proposal)
        gained = running_sum(best)[:, jnp.array(self.widths) - 1]
        width = jnp.array(self.widths)[jnp.argmax(gained / params.seconds, axis=1)]
        return best_nodes(proposal, place, width), state
