"""Acceptance rate (alpha) and mean accepted length (tau), with intervals over prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np

from specjax.decoding import Summary
from specjax.measure.intervals import Interval, interval


@dataclasses.dataclass(frozen=True)
class PromptCounts:
    """Counts of each of P prompts; every field is an integer array [P]."""

    passes: np.ndarray  # target passes
    emitted: np.ndarray  # new tokens
    tested: np.ndarray  # judged drafts
    accepted: np.ndarray  # accepted drafts

    @classmethod
    def from_summaries(cls, summaries: Iterable[Summary]) -> Self:
        """Returns the counts from the summaries of calls with one prompt each."""
        rows = [(s.target_passes, s.tokens, s.tested, s.accepted) for s in summaries]
        return cls(*np.array(rows).reshape(-1, 4).T)

    @classmethod
    def summed(cls, parts: Sequence[Self]) -> Self:
        """Returns a prompt for each part, with the sums over the prompts of that part."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(*(np.array([getattr(part, name).sum() for part in parts]) for name in names))

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Returns the prompts of all parts, one after the other."""
        names = [field.name for field in dataclasses.fields(cls)]
        columns = ([getattr(part, name) for part in parts] for name in names)
        return cls(*map(np.concatenate, columns))


def alpha_and_tau(counts: PromptCounts) -> dict[str, Interval | None]:
    """Returns `alpha` and `tau` as (value, low, high); alpha is None if no draft was judged."""
    return {
        "alpha": interval(counts.accepted, counts.tested),
        "tau": interval(counts.emitted, counts.passes),
    }
