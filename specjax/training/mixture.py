"""The texts of a run, mixed by weights."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterator

import numpy as np

from specjax._internal.checks import settle
from specjax.options.fields import option
from specjax.training.corpus import TextOptions, Tokens
from specjax.training.ordering import Rows, by_turns


@dataclasses.dataclass(frozen=True)
class DataOptions(TextOptions):
    """The data of a job: several sources of text, which may have weights."""

    group = "data"

    weights: tuple[float, ...] = option(
        (), "how much is read of each entry of --data, as in 3 1; by default all texts are one"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        asked, count, entries = " ".join(map(str, self.weights)), len(self.weights), len(self.data)
        settle(
            (
                count not in (0, entries),
                f"--weights {asked} are {count}, and --data has {entries} entries: pass one for "
                "each",
            ),
            (
                not all(math.isfinite(weight) and weight > 0 for weight in self.weights),
                f"--weights {asked}: each must be a finite number above 0",
            ),
        )


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

    def rows(self, length: int, seed: int) -> Rows:
        return by_turns([part.rows(length, seed) for part in self.parts], self.weights)
