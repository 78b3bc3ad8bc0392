"""`Cache`: the base class of the caches in which a model keeps the tokens that it has read."""

from __future__ import annotations

import abc
from typing import ClassVar, Self

from jax import Array


class Cache(abc.ABC):
    """Holds a model's state for the committed tokens of each row, and for the staged ones.

    A cache is a pytree (`flax.struct.dataclass`) whose leaves all have the row as axis 0.  Slots
    after the staged tokens may hold *scratch*: tokens that were rejected or rewound.
    """

    length: Array  # [B] int32; committed tokens

    commits_paths: ClassVar[bool] = False
    """True if `commit` accepts a path through a tree of staged tokens, False if only a prefix."""

    keeps_scratch: ClassVar[bool] = False
    """True if a `commit` after `rewind` can commit the first of the rewound tokens again."""

    @abc.abstractmethod
    def commit(self, count: Array, path: Array | None = None) -> Self:
        """Keeps `count` [B] staged tokens: those at the nodes `path` [B, T], or the first ones."""

    @abc.abstractmethod
    def rewind(self, to: Cache) -> Self:
        """Returns this cache with the committed tokens of `to`, an earlier value of this cache.

        Tokens that were committed since become scratch.
        """

    def truncate(self, count: Array) -> Self | None:
        """Returns this cache with only its first `count` [B] tokens, or None if it cannot."""
        del count
        return None

    def widened(self, width: int) -> Self | None:
        """Returns this cache as if its last pass had staged `width` tokens instead of fewer.

        None means that passes of different widths leave caches of different shapes.
        """
        del width
        return self if self.keeps_scratch else None

    def staged_as(self, shapes: Cache) -> Self:
        """Returns this cache with zeros staged, in the shapes of `shapes`; by default unchanged."""
        del shapes
        return self

    def narrow(self, ahead: int, widest: int) -> Self:
        """Returns this empty cache with less memory if the model needs less; by default unchanged.

        Args:
          ahead: the most tokens that are written after `length` before a `commit` or `rewind`.
          widest: the most tokens of one pass over a prompt.
        """
        del ahead, widest
        return self


def refuse_path(path: Array | None) -> None:
    """Raises ValueError if there is a path; for caches with `commits_paths = False`."""
    if path is not None:
        raise ValueError(
            "this cache commits the first staged tokens only: use a proposer of chains"
        )


def refuse_taps(taps: tuple[int, ...]) -> None:
    """Raises ValueError if there are taps; for models with `num_taps = 0`."""
    if taps:
        raise ValueError(
            f"taps={taps}, and this model offers no layer to read: use a proposer without taps"
        )
