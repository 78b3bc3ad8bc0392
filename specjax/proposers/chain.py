"""What proposers of chains have in common: their shape follows from the number of drafts."""

from __future__ import annotations


class Chain:
    """A mixin for a frozen dataclass with a field `num_drafts` (gamma)."""

    num_drafts: int
    is_chain = True

    def __post_init__(self):
        if self.num_drafts < 1:
            raise ValueError(f"num_drafts={self.num_drafts}; it must be at least 1")

    @property
    def num_nodes(self) -> int:
        """The drafts and the root."""
        return self.num_drafts + 1

    @property
    def max_depth(self) -> int:
        return self.num_drafts
