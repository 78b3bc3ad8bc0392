"""`Shape` and `BlockShape`: the base classes of proposers that arrange the drafts of a source."""

from __future__ import annotations

import dataclasses
from typing import Generic

from jax import Array

from specjax._internal.checks import typed
from specjax.contract import (
    BlockSource,
    Loaded,
    Lookahead,
    MemoryT,
    ParamsT,
    Proposer,
    ReadingT,
    Source,
    StateT,
)
from specjax.types import Block


@dataclasses.dataclass(frozen=True)
class _OverSource(Proposer[ParamsT, StateT], Generic[ParamsT, StateT, ReadingT, MemoryT]):
    """Calls a source.  Parameters and state are those of the source."""

    source: Source[ParamsT, StateT, ReadingT] | BlockSource[ParamsT, StateT, ReadingT, MemoryT]

    def bind(self, target: Loaded, draft: Loaded | None) -> ParamsT:
        return self.source.bind(target, draft)

    def read(self, params: ParamsT, state: StateT, block: Block) -> StateT:
        return self.source.read(params, state, block)

    def truncate(self, state: StateT, count: Array, last: Array | None) -> StateT | None:
        return self.source.truncate(state, count, last)

    def catch_up(self, params: ParamsT, state: StateT) -> StateT | None:
        return self.source.catch_up(params, state)

    def adapt(self, state: StateT, adapter: Array) -> StateT:
        return self.source.adapt(state, adapter)

    def observe(self, params: ParamsT, state: StateT, block: Block) -> StateT:
        return self.source.observe(params, state, block)


@dataclasses.dataclass(frozen=True)
class BlockShape(_OverSource[ParamsT, StateT, ReadingT, MemoryT]):
    """Arranges the drafts of a source that predicts several tokens in one pass."""

    source: BlockSource[ParamsT, StateT, ReadingT, MemoryT]

    def init(self, params: ParamsT, prompt: Block, capacity: int) -> StateT:
        return self.source.init(params, prompt, capacity)


@dataclasses.dataclass(frozen=True)
class Shape(_OverSource[ParamsT, StateT, ReadingT, None]):
    """Arranges the drafts of a source that predicts one token after another."""

    source: Source[ParamsT, StateT, ReadingT]
    _lookahead: Lookahead = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        such = "a source, such as DraftSource(draft.model, target.model.vocab_size)"
        typed(such, Source, source=self.source)

    def arrange(self, num_nodes: int, max_depth: int, staged: int) -> None:
        """Declares the sizes of the proposals, and the attributes that follow from the source.

        Args:
          num_nodes: N of a proposal, the root included.
          max_depth: D.
          staged: the most nodes that the source has staged at a time, the root included.
        """
        self.declare(
            num_nodes=num_nodes,
            max_depth=max_depth,
            taps=self.source.taps,
            shares_cache=self.source.shares_cache,
            asks_draft=self.source.asks_draft,
            narrower=(1,) if self.source.may_abstain else (),
            reads_documents=self.source.reads_documents,
            resumes=self.source.resumes,
            waits=self.source.waits,
            separable=self.source.asks_draft,
            scratch=staged if self.source.shares_cache else 0,
        )
        object.__setattr__(self, "_lookahead", Lookahead(max_depth, staged, self.is_chain))

    def init(self, params: ParamsT, prompt: Block, capacity: int) -> StateT:
        return self.source.init(params, prompt, capacity, self._lookahead)

    def rest(self, state: StateT) -> StateT:
        return self.source.rest(state)

    def resume(
        self, params: ParamsT, state: StateT, text: Array, length: Array, wanted: Array
    ) -> StateT:
        return self.source.resume(params, state, text, length, wanted)
