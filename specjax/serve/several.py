"""Starts what needs Ray: fleets and pools of workers; its packages are imported only here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specjax.serve.layout import Fleet
from specjax.serve.offline import Pool


def run_fleet(
    fleet: Fleet, host: str, port: int, started: Callable[[str], None] | None = None
) -> None:
    """Runs a fleet until SIGTERM or SIGINT.

    Args:
      started: called with the address once all replicas serve.

    Raises:
      ImportError: ray is not installed.
    """
    from specjax.serve.fleet import run

    run(fleet, host, port, started)


def fleet_application(fleet: Fleet) -> Any:
    """Returns a fleet as an application of Ray Serve.

    Raises:
      ImportError: ray is not installed.
    """
    from specjax.serve.fleet import application

    return application(fleet)


def ray_pool(workers: int) -> Pool:
    """Returns a pool of so many processes, for `write_texts`.

    Raises:
      ImportError: ray is not installed.
    """
    from specjax.serve.fleet import RayPool

    return RayPool(workers)
