"""Laws over drawn inputs (hypothesis): how many examples, and strategies that several files use.

The examples are the same in every run.  Shapes are fixed, so that a law compiles few programs and
its examples are data; floats come from a drawn seed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import HealthCheck, configuration, settings
from hypothesis import strategies as st

# Otherwise hypothesis makes a folder in the checkout, for what it finds out about Unicode.
configuration.set_hypothesis_home_dir(tempfile.gettempdir())


def law(examples: int) -> Callable[[Any], Any]:
    """So many examples, the same in every run, whatever time each takes."""
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


seeds = st.integers(0, 2**32 - 1)
"""Of the floats of an example."""


@st.composite
def parents(draw: st.DrawFn, size: int, max_depth: int, most: int) -> np.ndarray:
    """[size] parents in topological order: trees between a chain and a star, with absent nodes.

    No node is deeper than `max_depth` or has more than `most` children.
    """
    count, reach = draw(st.integers(1, size)), draw(st.integers(1, size))
    backs = draw(
        st.lists(
            st.none() | st.integers(1, reach) if draw(st.booleans()) else st.integers(1, reach),
            min_size=count - 1,
            max_size=count - 1,
        )
    )
    parent, depth, children = np.full(size, -1, np.int32), np.zeros(size, int), np.zeros(size, int)
    for node, back in enumerate(backs, start=1):
        up = -1 if back is None else max(node - back, 0)
        if up >= 0 and depth[up] < max_depth and children[up] < most:
            parent[node], depth[node] = up, depth[up] + 1
            children[up] += 1
    return parent


def distinct_siblings(rng: np.random.Generator, parent: np.ndarray, vocab: int) -> np.ndarray:
    """[N] tokens below `vocab`; no two children of a node are equal."""
    tokens = np.zeros(len(parent), np.int32)
    for up in range(-1, len(parent)):
        below = np.flatnonzero(parent == up)
        tokens[below] = (
            rng.integers(0, vocab, len(below)) if up < 0 else rng.permutation(vocab)[: len(below)]
        )
    return tokens
