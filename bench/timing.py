"""Contestants of `python -m bench` take turns: see `specjax.measure`."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from bench.contestants import Contestant
from specjax import measure
from specjax.measure import Interval, PromptCounts, Sample, first_calls, take_turns


class Timed(measure.Timed):
    """What was measured of one contestant.

    Attributes:
      contestant: the one that was measured.
      tokens: [B, new] of the first call of each batch.
      counts: of each batch, for each row; an empty list if the contestant reports none.
    """

    def __init__(self, contestant: Contestant, prompts: Sequence[np.ndarray], new: int) -> None:
        name = f"{contestant.library} {contestant.name} {contestant.num_drafts}"
        super().__init__(name, len(prompts))
        self.contestant, self._prompts, self._new = contestant, prompts, new
        self.tokens: list[np.ndarray] = []
        self.counts: list[PromptCounts] = []

    def run(self, item: int) -> Sample:
        started = time.perf_counter()
        tokens = self.contestant.run(self._prompts[item], self._new)
        seconds = time.perf_counter() - started
        if item == len(self.tokens):
            self.tokens.append(tokens)
            self.counts += self.contestant.counts[-1:]
        return Sample(seconds, prefill=next(reversed(self.contestant.prefill), None))

    @property
    def step(self) -> float | None:
        """Seconds of a decoding step, which serves all rows of a batch together."""
        steps = sum(int(counts.passes.max()) for counts in self.counts)
        return self.decoding / steps if self.decoding and steps else None

    def acceptance(self) -> dict[str, Interval | None]:
        """`alpha` and `tau` over the rows of all batches; None if there are no counts."""
        if not self.counts:
            return {"alpha": None, "tau": None}
        return measure.alpha_and_tau(PromptCounts.join(self.counts))


def alternate(
    contestants: Sequence[Contestant],
    prompts: Sequence[np.ndarray],
    new: int,
    rounds: int,
    until: float = math.inf,
) -> tuple[list[Timed], list[str]]:
    """Run every batch once with each contestant to compile, then `rounds` times in turn.

    A contestant whose first call would begin too late before `until` (on the clock of
    `time.perf_counter`) is left out, and so is one that fails, so that an unattended run goes on
    with the others.

    Returns:
      What was measured of each contestant, and for each one left out a line that says why.
    """
    ready, left_out = first_calls(
        [Timed(c, prompts, new) for c in contestants], until, forgive=True
    )
    take_turns(ready, rounds, until)
    return ready, left_out
