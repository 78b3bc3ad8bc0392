"""Mixes sources of data by weights, so that each has its share after every row.

The rows of a mixture are numbered.  `turns` computes the source of a row, and the number of rows of
that source before it, from only the row's number and the weights.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterator, Sequence

import numpy as np

from specjax.options.fields import Options, option
from specjax.training.corpus import Tokens


@dataclasses.dataclass(frozen=True)
class WeightOptions(Options):
    """The shares of several sources of data."""

    group = "data"

    weights: tuple[float, ...] = option(
        (), "how much is read of each entry of --data, as in 3 1; by default all texts are one"
    )

    def check_weights(self, data: tuple[str, ...]) -> None:
        """Raises ValueError unless there is a weight for each entry."""
        asked = " ".join(map(str, self.weights))
        if self.weights and len(self.weights) != len(data):
            raise ValueError(
                f"--weights {asked} are {len(self.weights)}, and --data has {len(data)} entries: "
                "pass one for each"
            )
        if not all(math.isfinite(weight) and weight > 0 for weight in self.weights):
            raise ValueError(f"--weights {asked}: each must be a finite number above 0")


def turns(number: int, weights: Sequence[float]) -> tuple[int, int]:
    """Returns the source of a row, and the row's number within it.

    The first n rows have n w / (w + the later weights) of the first source, rounded; the others are
    divided among the later sources in the same way.  So each source has its share to within a row
    for each source before it.
    """
    for source, weight in enumerate(weights[:-1]):
        share = weight / math.fsum(weights[source:])
        before, after = (math.floor(n * share + 0.5) for n in (number, number + 1))
        if after > before:
            return source, before
        number -= before
    return len(weights) - 1, number


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Streams of text, as one stream; the methods are those of `Tokens`."""

    parts: tuple[Tokens, ...]
    weights: tuple[float, ...]

    def blocks(self) -> Iterator[np.ndarray]:
        """Yields all token ids, in blocks that fit into memory."""
        for part in self.parts:
            yield from part.blocks()

    @functools.cached_property
    def inputs(self) -> dict[str, str]:
        """Returns hashes of the tokenizer and of all the text, by name."""
        texts = "".join(part.inputs["text"] for part in self.parts)
        return {**self.parts[0].inputs, "text": hashlib.sha256(texts.encode()).hexdigest()}

    def windows(self, length: int) -> int:
        """Returns the rows after which the source that is read most often begins anew."""
        whole = math.fsum(self.weights)
        return min(
            math.ceil(part.windows(length) * whole / weight)
            for part, weight in zip(self.parts, self.weights, strict=True)
        )

    def batch(self, step: int, rows: int, length: int, seed: int) -> np.ndarray:
        return self.rows(step * rows, rows, length, seed)

    def rows(self, first: int, count: int, length: int, seed: int) -> np.ndarray:
        found = (turns(number, self.weights) for number in range(first, first + count))
        rows = [self.parts[part].rows(index, 1, length, seed) for part, index in found]
        return np.concatenate(rows)
