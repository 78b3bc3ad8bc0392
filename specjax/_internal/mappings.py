"""The memory mappings of this process, of which Linux allows a number, 65530 by default.

XLA:CPU makes three or four for each kernel of a compiled program, so a program of decoding has one
or two thousand.  Where the next one is refused, XLA crashes: "Cannot allocate memory".
"""

from __future__ import annotations

import functools
import pathlib

_OWN = pathlib.Path("/proc/self/maps")
_MOST = pathlib.Path("/proc/sys/vm/max_map_count")


@functools.cache
def _most() -> int | None:
    return int(_MOST.read_text()) if _MOST.exists() else None


def mapped() -> float:
    """Returns the share of the allowed mappings that this process has; 0 where none are counted."""
    most = _most()
    if most is None or not _OWN.exists():
        return 0.0
    return _OWN.read_bytes().count(b"\n") / most
