"""`Shape`: what proposers have in common that arrange the guesses of a source."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.contract import Loaded, Lookahead, Proposer, Source
from specjax.types import Block


@dataclasses.dataclass(frozen=True)
class Shape(Proposer):
    """Parameters and state are the source's.  A shape says in which order the source is asked."""

    source: Source
    _lookahead: Lookahead = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self):
        if not isinstance(self.source, Source):
            raise ValueError(
                f"source is a {type(self.source).__name__}; pass a source, such as "
                "DraftSource(draft.model, target.model.vocab_size)"
            )

    def arrange(self, num_nodes: int, max_depth: int, staged: int) -> None:
        """Declare the sizes, and what follows from the source.

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
            scratch=staged if self.source.shares_cache else 0,
        )
        object.__setattr__(self, "_lookahead", Lookahead(max_depth, staged, self.is_chain))

    def bind(self, target: Loaded, draft: Loaded | None) -> Any:
        return self.source.bind(target, draft)

    def init(self, params: Any, prompt: Block, capacity: int) -> Any:
        return self.source.init(params, prompt, capacity, self._lookahead)

    def observe(self, params: Any, state: Any, block: Block) -> Any:
        return self.source.observe(params, state, block)
