"""Ray on this machine: `joined`, and what an actor asks of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import ray  # pyright: ignore[reportMissingImports]


def needs(cpus: float, resources: Mapping[str, float]) -> dict[str, Any]:
    """Returns the options of an actor; Ray counts GPUs apart from other resources."""
    others = {name: count for name, count in resources.items() if name != "GPU"}
    return {"num_cpus": cpus, "num_gpus": resources.get("GPU", 0), "resources": others}


@contextlib.contextmanager
def joined(actors: int, cpus: float, resources: Mapping[str, float]) -> Iterator[bool]:
    """Starts Ray for so many actors, and stops it, unless there is a cluster already.

    That is the cluster that this process has joined, or that the variable RAY_ADDRESS names.

    Yields:
      True if it was started here.
    """
    if ray.is_initialized():
        yield False
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False)
        try:
            yield False
        finally:
            ray.shutdown()
        return
    # Ray takes less of the cores if replicas' code and the router have no threads of their own.
    os.environ.setdefault("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1")
    all_of_them = needs(cpus, {name: actors * count for name, count in resources.items()})
    # Ray counts cores and does not bind to them, so a small machine may claim to have more.
    all_of_them["num_cpus"] = max(os.cpu_count() or 1, int(actors * cpus + 2))
    # Without an address Ray would join the cluster that was started last on this machine, even if
    # it has been killed.
    ray.init(address="local", include_dashboard=False, log_to_driver=False, **all_of_them)
    try:
        yield True
    finally:
        ray.shutdown()
