"""`Meter`: the load that other processes put on the cores."""

from __future__ import annotations

import os
import pathlib
import time


class Meter:
    """Measures the load that other processes put on the cores since the meter was made."""

    def __init__(self) -> None:
        self._start = self._read()

    def busy(self) -> float:
        """The share of all cores that other processes used; 0 if the system does not report it."""
        wall, own, everyone = (b - a for a, b in zip(self._start, self._read(), strict=True))
        # Below 20 ms the kernel's clock ticks are too coarse to tell.
        return max(0.0, everyone - own) / (wall * (os.cpu_count() or 1)) if wall > 0.02 else 0.0

    @staticmethod
    def _read() -> tuple[float, float, float]:
        """Seconds of wall time, of this process, and of all processes on all cores."""
        everyone = 0.0
        stat = pathlib.Path("/proc/stat")
        if stat.exists():
            ticks = [int(x) for x in stat.read_text().split("\n", 1)[0].split()[1:]]
            # Fields 3 and 4 are idle time.
            everyone = (sum(ticks[:3]) + sum(ticks[5:8])) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), time.process_time(), everyone
