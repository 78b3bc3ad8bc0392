"""What a datastore and a row's own text vote for, by counting all places in Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from specjax.methods.datastore import lookup

Places = list[tuple[tuple[int, ...], int]]


def contexts(texts: Iterable[Sequence[int]]) -> Places:
    """Each place: its context, the last token first, and its continuation."""
    return [
        (tuple(text[at - 1 :: -1]) if at else (), text[at])
        for text in texts
        for at in range(1, len(text))
    ]


def agreed(one: Sequence[int], other: Sequence[int]) -> int:
    """In how many tokens two contexts agree."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
                min(len(one), len(other)))  # fmt: skip


def mixed(store: Places, own: Places, some: Sequence[int], prior: np.ndarray) -> np.ndarray:
    """The distribution [V] after the context `some`, as the docstring of `look_up` says."""
    p = np.array(prior, np.float64)
    for n in range(1, lookup._OWN_LONGEST + 1):
        votes = []
        if n <= lookup._SHORT or n in lookup._LONG:
            votes.append((lookup._DOUBT, [t for c, t in store if agreed(c, some) >= n]))
        votes.append((1.0, [t for c, t in own if agreed(c, some) >= n]))
        for doubt, tokens in votes:
            counts = np.bincount(np.array(tokens, int), minlength=len(p))
            kinds = doubt * (counts > 0).sum()
            if tokens:
                p = (counts + kinds * p) / (counts.sum() + kinds)
    return p
