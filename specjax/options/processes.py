"""The options of a command that runs in several processes."""

from __future__ import annotations

import dataclasses

from specjax.options.fields import Options, option


@dataclasses.dataclass(frozen=True)
class ProcessOptions(Options):
    """The options that `specjax.parallel.join_from` reads; a run may be resumed with others."""

    group = "device"

    coordinator: str | None = option(
        None,
        "address of the first of several processes that run this command; auto takes it from the "
        "cluster's environment",
        free=True,
        metavar="HOST:PORT",
    )
    num_processes: int | None = option(
        None, "number of processes; default: JAX_NUM_PROCESSES", free=True
    )
    process_id: int | None = option(
        None, "number of this process, from 0; default: JAX_PROCESS_ID", free=True
    )
