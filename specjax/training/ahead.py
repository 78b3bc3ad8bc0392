"""Makes batches in a thread while the device computes the step before."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable

from specjax.contract import Arrays

_AHEAD = 2
"""Batches that are made in advance."""


class Ahead:
    """The batches of steps that are asked for in order.

    A batch depends only on its step, so it does not matter when it is made.

    Args:
      batch: makes the batch of a step.
      stop: the first step without a batch.
    """

    def __init__(self, batch: Callable[[int], Arrays], stop: int) -> None:
        self._batch, self._stop = batch, stop
        self._made: dict[int, concurrent.futures.Future[Arrays]] = {}
        self._worker = concurrent.futures.ThreadPoolExecutor(1)

    def of(self, step: int) -> Arrays:
        """Returns the batch of a step; the batches of the next steps are made from now on."""
        for number in range(step, min(step + 1 + _AHEAD, self._stop)):
            if number not in self._made:
                self._made[number] = self._worker.submit(self._batch, number)
        return self._made.pop(step).result()

    def close(self) -> None:
        self._worker.shutdown(cancel_futures=True)
