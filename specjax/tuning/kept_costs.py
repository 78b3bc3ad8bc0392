"""What the options of `Adaptive` cost, kept for a day beside a command's compiled programs."""

from __future__ import annotations

import json
import time

import numpy as np

from specjax._internal import kept_programs
from specjax.tuning.calibrate import Learned

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
    return Learned(np.array(held["seconds"]), np.array(held["prior"]), 0.0, longer=longer)
