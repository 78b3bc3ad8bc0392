"""`Narrow`: the first nodes of another proposer's proposals, with the same state."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.contract import Context, Wrapper
from specjax.types import Proposal


@dataclasses.dataclass(frozen=True)
class Narrow(Wrapper[Any, Any, Any]):
    """Keeps the first `nodes` nodes of each proposal, the root included.

    A node comes after its parent, so the first nodes are a tree, too.  The state is that of
    `inner`, so programs of several widths can take turns with one state.  A program of one width is
    faster than the same width in a program of several ones, and compiles in a part of the time.
    """

    nodes: int

    def __post_init__(self) -> None:
        depth = min(self.inner.max_depth, self.nodes - 1)
        self.declare_like(num_nodes=self.nodes, max_depth=depth, narrower=())

    def propose(self, params: Any, state: Any, context: Context) -> tuple[Proposal, Any]:
        depth = jnp.int32(self.max_depth)
        depth = depth if context.depth is None else jnp.minimum(context.depth, depth)
        context = dataclasses.replace(context, depth=depth)
        made, state = self.inner.propose(params, state, context)
        first = jax.tree.map(lambda x: x[:, : self.nodes], made)
        return first, state
