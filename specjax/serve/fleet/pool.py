"""`RayPool`: workers that Ray Data starts, watches, and starts again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from specjax._internal.checks import whole
from specjax._internal.extras import install
from specjax.types import Json

try:
    import ray  # pyright: ignore[reportMissingImports]
    import ray.data  # pyright: ignore[reportMissingImports]
except ImportError as missing:
    raise ImportError(f"workers of Ray need ray ({missing}): {install('ray')}") from missing

from specjax.serve.fleet.machine import joined, needs

Row = dict[str, Json]


class _Worker:
    """What an actor of Ray Data calls: a block of parts in, a block of results out."""

    def __init__(self, make: Callable[[], Callable[[list[Row]], list[Row]]]) -> None:
        self._work = make()

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        return {"part": [json.dumps(self._work(json.loads(text))) for text in batch["part"]]}


@dataclasses.dataclass(frozen=True)
class RayPool:
    """A pool of `specjax.serve.offline`.

    A worker that dies is started again, and its part is done again.

    Attributes:
      workers: how many.
      cpus: of each, for Ray's planning.
      resources: what else a worker needs, such as {"TPU": 4}.
    """

    workers: int
    cpus: float = 1.0
    resources: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        whole("workers", self.workers, 1, 2**31, "a whole number of at least 1")

    def __call__(
        self, make: Callable[[], Callable[[list[Row]], list[Row]]], parts: Sequence[list[Row]]
    ) -> Iterator[list[Row]]:
        if not parts:
            return
        with joined(self.workers, self.cpus, self.resources):
            texts = [{"part": json.dumps(part)} for part in parts]
            made = ray.data.from_items(texts, override_num_blocks=len(texts)).map_batches(
                _Worker, fn_constructor_args=[make], batch_size=1,
                compute=ray.data.ActorPoolStrategy(
                    size=self.workers, max_tasks_in_flight_per_actor=1
                ),
                **needs(self.cpus, self.resources),
            )  # fmt: skip
            for row in made.iter_rows():
                yield json.loads(row["part"])
