"""`Shape` and `BlockShape`: the base classes of proposers that arrange the drafts of a source."""

from __future__ import annotations

import dataclasses

from jax import Array

from specjax._internal.checks import typed
from specjax.contract import Arrays, BlockSource, Loaded, Lookahead, Proposer, Source
from specjax.types import Block


@dataclasses.dataclass(frozen=True)
class _OverSource(Proposer):
    """Calls a source.  Parameters and state are those of the source."""

    source: Source | BlockSource

    def bind(self, target: Loaded, draft: Loaded | None) -> Arrays:
        return self.source.bind(target, draft)

    def read(self, params: Arrays, state: Arrays, block: Block) -> Arrays:
        return self.source.read(params, state, block)

    def truncate(self, state: Arrays, count: Array, last: Array | None) -> Arrays | None:
        return self.source.truncate(state, count, last)

    def adapt(self, state: Arrays, adapter: Array) -> Arrays:
        return self.source.adapt(state, adapter)

    def observe(self, params: Arrays, state: Arrays, block: Block) -> Arrays:
        return self.source.observe(params, state, block)


@dataclasses.dataclass(frozen=True)
class BlockShape(_OverSource):
    """Arranges the drafts of a source that predicts several tokens in one pass."""

    source: BlockSource

    def init(self, params: Arrays, prompt: Block, capacity: int) -> Arrays:
        return self.source.init(params, prompt, capacity)


@dataclasses.dataclass(frozen=True)
class Shape(_OverSource):
    """Arranges the drafts of a source that predicts one token after another."""

    source: Source
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
            separable=self.source.asks_draft,
            scratch=staged if self.source.shares_cache else 0,
        )
        object.__setattr__(self, "_lookahead", Lookahead(max_depth, staged, self.is_chain))

    def init(self, params: Arrays, prompt: Block, capacity: int) -> Arrays:
        return self.source.init(params, prompt, capacity, self._lookahead)

    def rest(self, state: Arrays) -> Arrays:
        return self.source.rest(state)

    def resume(
        self, params: Arrays, state: Arrays, text: Array, length: Array, wanted: Array
    ) -> Arrays:
        return self.source.resume(params, state, text, length, wanted)
