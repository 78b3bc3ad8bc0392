"""`Wrapper`: a proposer that changes the proposals of another one."""

from __future__ import annotations

import dataclasses
from typing import Generic, TypeVar, cast

from jax import Array

from specjax.contract.model import Loaded
from specjax.contract.proposer import Proposer
from specjax.contract.rule import Rule
from specjax.contract.variables import ParamsT, StateT
from specjax.types import Block

_InnerT = TypeVar("_InnerT")

_LIKE = (
    "num_nodes", "max_depth", "is_chain", "taps", "narrower", "estimates", "shares_cache",
    "scratch", "point_mass", "asks_draft", "reads_documents", "resumes", "waits", "separable",
    "brief",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Wrapper(Proposer[ParamsT, StateT], Generic[ParamsT, StateT, _InnerT]):
    """Forwards every call to `inner`; a subclass overrides the methods that it changes.

    Its state is the state of `inner`.

    Example:
      >>> class OnlyTwo(Wrapper):
      ...     "Leaves out the drafts after the first two."
      ...
      ...     def propose(self, params, state, context):
      ...         made, state = self.inner.propose(self.own(params), state, context)
      ...         kept = jnp.where(jnp.arange(self.num_nodes) > 2, ABSENT, made.parent)
      ...         return dataclasses.replace(made, parent=kept), state
    """

    inner: Proposer[_InnerT, StateT]

    def __post_init__(self) -> None:
        self.declare_like()

    def declare_like(self, **changes: object) -> None:
        """Declares the attributes of `inner`, except those that are given."""
        self.declare(**{name: getattr(self.inner, name) for name in _LIKE} | changes)

    def own(self, params: ParamsT) -> _InnerT:
        """Returns the parameters of `inner`, by default all of them."""
        return cast(_InnerT, params)

    def check(self, rule: Rule) -> None:
        self.inner.check(rule)

    def bind(self, target: Loaded, draft: Loaded | None) -> ParamsT:
        return cast(ParamsT, self.inner.bind(target, draft))

    def init(self, params: ParamsT, prompt: Block, capacity: int) -> StateT:
        return self.inner.init(self.own(params), prompt, capacity)

    def read(self, params: ParamsT, state: StateT, block: Block) -> StateT:
        return self.inner.read(self.own(params), state, block)

    def truncate(self, state: StateT, count: Array, last: Array | None) -> StateT | None:
        return self.inner.truncate(state, count, last)

    def catch_up(self, params: ParamsT, state: StateT) -> StateT | None:
        return self.inner.catch_up(self.own(params), state)

    def adapt(self, state: StateT, adapter: Array) -> StateT:
        return self.inner.adapt(state, adapter)

    def observe(self, params: ParamsT, state: StateT, block: Block) -> StateT:
        return self.inner.observe(self.own(params), state, block)

    def rest(self, state: StateT) -> StateT:
        return self.inner.rest(state)

    def resume(
        self, params: ParamsT, state: StateT, text: Array, length: Array, wanted: Array
    ) -> StateT:
        return self.inner.resume(self.own(params), state, text, length, wanted)
