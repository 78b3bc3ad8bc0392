"""The job of `train.drafter --teacher`: learning from hidden states that were recorded."""

from __future__ import annotations

import dataclasses

import numpy as np

from specjax.training.jobs.drafter_job import TrainDrafter
from specjax.training.recorded import Recorded


@dataclasses.dataclass(eq=False)
class RecordedDrafter(TrainDrafter):
    """Trains a drafter with the recorded hidden states of its target."""

    teacher: Recorded = dataclasses.field(kw_only=True)

    def batch(self, step: int) -> dict[str, np.ndarray]:
        return self.teacher.batch(self.options, step)

    def held_out(self, first: int, rows: int) -> dict[str, np.ndarray]:
        return self.teacher.held_out(first, rows)
