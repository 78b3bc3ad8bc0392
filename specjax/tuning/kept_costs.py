"""What the options of `Adaptive` cost, kept for a day beside a command's compiled programs."""

from __future__ import annotations

import dataclasses
import json
import time

import numpy as np

from specjax._internal import kept_programs
from specjax.tuning.calibrate import Learned
from specjax.tuning.demand import Demand

KEPT_SECONDS = 86_400
"""The seconds for which costs are kept: the machine may have been busy when they were measured."""


def keep_costs(learned: Learned, *known: object) -> None:
    """Keeps what was measured for later processes, if programs are kept.

    Args:
      learned: of this process.
      known: all that the costs depend on, beside the machine.
    """
    held = {
        "at": time.time(),
        "seconds": learned.seconds.tolist(),
        "prior": learned.prior.tolist(),
        "awake": learned.awake,
        "longer": None if learned.longer is None else learned.longer.tolist(),
    }
    kept_programs.write(kept_programs.place_of("costs", *known), json.dumps(held).encode())


def read_costs(*known: object) -> Learned | None:
    """Returns what an earlier process measured; None if nothing is kept, or if it is too old."""
    kept = kept_programs.read(kept_programs.place_of("costs", *known))
    if kept is None:
        return None
    held = json.loads(kept)
    if not 0 <= time.time() - held["at"] <= KEPT_SECONDS:
        return None
    longer = held.get("longer")
    longer = None if longer is None else np.array(longer)
    awake = held.get("awake", 0.0)
    seconds, prior = (np.array(held[name]) for name in ("seconds", "prior"))
    return Learned(seconds, prior, 0.0, longer=longer, awake=awake)


def keep_demand(demand: Demand, *known: object) -> None:
    """Keeps for later processes what few options have lost, if programs are kept."""
    held = json.dumps(dataclasses.asdict(demand)).encode()
    kept_programs.write(kept_programs.place_of("demand", *known), held)


def add_demand(demand: Demand, lost: float, *known: object) -> None:
    """Keeps that a call has lost some seconds more, beside what other processes have kept since.

    `demand` then has theirs too.  Of two calls that end within a millisecond one may be forgotten,
    which puts off the compilation by a call.

    Args:
      demand: of this process, which has counted the call.
      lost: the seconds of the call.
      known: as for `keep_demand`.
    """
    if (kept := read_demand(*known)) is not None:
        demand.lost = kept.lost + lost
    keep_demand(demand, *known)


def read_demand(*known: object) -> Demand | None:
    """Returns what earlier processes have lost; None if nothing is kept."""
    kept = kept_programs.read(kept_programs.place_of("demand", *known))
    if kept is None:
        return None
    held = json.loads(kept)
    return Demand(tuple(held["depths"]), held["compiling"], held["lost"])
