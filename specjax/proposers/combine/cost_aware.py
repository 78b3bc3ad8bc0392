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

    Under independent draws (`rejection`) whether a draft is kept may not depend on its own token,
    and so not on the chances of its descendants.  There a row takes the first width after which no
    wider one pays, if all further drafts were as likely as the best of them.

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
        widths = jnp.array(self.widths)
        gained = running_sum(best)[:, widths - 1]
        if context.shared_noise:
            chosen = jnp.argmax(gained / params.seconds, axis=1)
        else:
            chosen = _first_that_stops(best, gained, self.widths, params.seconds)
        return best_nodes(proposal, place, widths[chosen]), state


def _first_that_stops(best: Array, gained: Array, widths: tuple[int, ...], seconds: Array) -> Array:
    """Returns [B]: the index of the first width after which no wider one promises more.

    A node's token changes the chances of its descendants, which come after it.  So the nodes from
    place w on are judged by the chance of the first of them, as if all were as likely: it depends
    on the tokens of better nodes alone.

    Args:
      best: [B, N] chances of all nodes, best first.
      gained: [B, W] their sum up to each width.
      widths: ascending numbers of nodes.
      seconds: [W] of a step with each.
    """
    sizes = jnp.array(widths)
    following = best[:, sizes[:-1]]  # [B, W - 1] the chance of the first node left out
    more = jnp.maximum(sizes - sizes[:-1, None], 0)  # [W - 1, W] nodes
    hoped = (gained[:, :-1, None] + following[..., None] * more) / seconds
    wider = sizes > sizes[:-1, None]
    stops = ~((hoped > (gained / seconds)[:, :-1, None]) & wider).any(2)
    return jnp.argmax(jnp.pad(stops, ((0, 0), (0, 1)), constant_values=True), axis=1)
