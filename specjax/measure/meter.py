"""`Meter`: measures the load of processes other than this one and its children."""

from __future__ import annotations

import os
import pathlib
import time


class Meter:
    """Measures the load of other processes since its creation; children count as this process."""

    def __init__(self) -> None:
        self._start = self._read()

    def busy(self) -> float:
        """Returns the share of all cores that other processes used; 0 if it is not known."""
        wall, own, everyone = (b - a for a, b in zip(self._start, self._read(), strict=True))
        # Below 20 ms the kernel's clock ticks are too coarse to tell.
        return max(0.0, everyone - own) / (wall * (os.cpu_count() or 1)) if wall > 0.02 else 0.0

    @staticmethod
    def _read() -> tuple[float, float, float]:
        """Reads the seconds of wall time, of this process with its children, and of all cores."""
        everyone = 0.0
        stat = pathlib.Path("/proc/stat")
        if stat.exists():
            ticks = [int(x) for x in stat.read_text().split("\n", 1)[0].split()[1:]]
            # Fields 3 and 4 are idle time.
            everyone = (sum(ticks[:3]) + sum(ticks[5:8])) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), time.process_time() + _of_children(), everyone


def _of_children() -> float:
    """Returns the seconds of the living children; 0 where the system lists no processes."""
    seconds = 0.0
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it ended since it was listed
            continue
        if int(fields[1]) == os.getpid():
            seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds
