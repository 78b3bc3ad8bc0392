"""`Replica`: one engine of a fleet, in a process of its own, which answers the calls of HTTP."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable

from specjax.serve.engine import Engine
from specjax.serve.fleet.call import Call, Head, answers
from specjax.serve.http import Limits, make_app


class Replica:
    """An engine and its routes.  Ray makes it, calls its methods, and stops it."""

    def __init__(self, make: Callable[[], Engine], limits: Limits, pin: bool = False) -> None:
        """Compiles the programs of the engine.

        Args:
          make: makes the engine.
          limits: of requests.
          pin: bind this process to one core, by its number among the replicas.
        """
        if pin:
            from ray import serve  # pyright: ignore[reportMissingImports]

            cores = sorted(os.sched_getaffinity(0))
            number = serve.get_replica_context().rank.rank
            os.sched_setaffinity(0, {cores[number % len(cores)]})
        self.engine = make()
        self.app = make_app(self.engine, limits)

    async def answer(self, call: Call) -> AsyncIterator[Head | bytes]:
        """Yields the head and the parts of the answer to a call."""
        async for part in answers(self.app, call):
            yield part

    def check_health(self) -> None:
        """Raises RuntimeError if the engine has stopped, so that Ray starts another replica."""
        if not self.engine.healthy:
            raise RuntimeError("the engine has stopped")

    def record_routing_stats(self) -> dict[str, float]:
        """Returns the load of the engine, for routers."""
        load = self.engine.load()
        return {
            "num_requests_running": load.running, "num_requests_waiting": load.waiting,
            "kv_cache_usage_perc": load.cache_share, "prompt_tokens": load.prompt_tokens,
            "copied_tokens": load.copied_tokens,
        }  # fmt: skip

    async def about(self) -> dict[str, int | str]:
        """Returns the number of this process and the hash of its model."""
        return {"pid": os.getpid(), "model_hash": self.engine.model_hash}

    def __del__(self) -> None:
        """Stops the engine, once Ray has waited for the calls that run."""
        if hasattr(self, "engine"):
            self.engine.close(finish=False)
        if hasattr(self, "app") and self.app.state.service.tracing is not None:
            self.app.state.service.tracing.close()
