"""The processors that this process may use."""

from __future__ import annotations

import os


def processors() -> int:
    """Returns their number, which may be less than the machine has."""
    allowed = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(allowed(0)) if allowed else os.cpu_count() or 1
