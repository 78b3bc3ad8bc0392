"""`Forced`: drafts the tokens that a row's constraint forces."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from specjax import tree
from specjax.contract import Context, Proposer
from specjax.proposers.shapes import check_num_drafts
from specjax.types import ABSENT, Proposal

_WIDTHS = (1, 3, 5)
"""Numbers of tokens that the target may read of a row, up to the number of drafts and one."""


@dataclasses.dataclass(frozen=True)
class Forced(Proposer[None, tuple[()]]):
    """Drafts the tokens that a row's constraint forces, such as the keys and braces of JSON.

    Where the characters that follow are forced, the drafts are the tokens that the tokenizer spells
    them with.  The target may spell them otherwise, so it verifies these drafts like all others.
    Rows without a constraint, and those in a state with several possible next characters, have no
    drafts; combine it with another proposer by `FirstOf(Forced(4), NGram(4))`.

    Example:
      >>> drafter = specjax.first_of(Forced(8), specjax.NGram(8))
      >>> specjax.generate(target, prompt, constraint=constraint, drafter=drafter)
    """

    num_drafts: int = 4
    is_chain = True
    point_mass = True

    def __post_init__(self) -> None:
        check_num_drafts(self.num_drafts)
        nodes = self.num_drafts + 1
        narrower = tuple(width for width in _WIDTHS if width < nodes)
        self.declare(num_nodes=nodes, max_depth=self.num_drafts, narrower=narrower)

    def truncate(self, state: tuple[()], count: Array, last: Array | None) -> tuple[()]:
        return state

    def propose(
        self, params: None, state: tuple[()], context: Context
    ) -> tuple[Proposal, tuple[()]]:
        pending = context.pending
        if context.forced is None:
            drafts = jnp.zeros((len(pending), self.num_drafts), jnp.int32)
            count = jnp.zeros(len(pending), jnp.int32)
        else:
            drafts, count = context.forced(self.num_drafts)
        present = jnp.arange(self.num_nodes) <= count[:, None]
        parent = jnp.where(present, tree.chain(self.num_nodes), ABSENT)
        tokens = jnp.concatenate([pending[:, None], drafts], axis=1)
        return Proposal(tokens, parent, point_mass=True), state
