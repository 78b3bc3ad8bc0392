"""The options from which the sizes of a new drafter follow."""

from __future__ import annotations

from typing import Protocol

from specjax.models import TransformerConfig


class Sizes(Protocol):
    """The options of a drafter's network."""

    @property
    def num_drafts(self) -> int: ...

    @property
    def num_layers(self) -> int | None: ...

    @property
    def mlp_size(self) -> int | None: ...

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def own_head(self) -> bool | None: ...

    @property
    def draft_vocab_size(self) -> int: ...

    @property
    def markov_rank(self) -> int: ...

    @property
    def markov_head(self) -> str: ...

    @property
    def confidence(self) -> bool: ...


def units_of(options: Sizes, target: TransformerConfig) -> int:
    """Returns U, the number of tokens that the drafter knows."""
    return options.draft_vocab_size or target.vocab_size


def owns_head(options: Sizes, default: bool) -> bool:
    """Returns whether the drafter has its own head, which a reduced vocabulary needs."""
    if options.draft_vocab_size:
        return True
    return default if options.own_head is None else options.own_head
