"""Python looks for unreachable cycles less often while programs are traced and commands run."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_OBJECTS = 50_000
"""The new objects after which the youngest are searched; Python's own number is 700 or 2000."""

_lock = threading.Lock()
_inside, _before = 0, gc.get_threshold()


@contextlib.contextmanager
def collecting_rarely() -> Iterator[None]:
    """Inside, cycles are searched rarely; threads and calls may be inside at the same time.

    Imports and traces make many objects that stay, and Python would search all of them again and
    again.
    """
    global _inside, _before
    with _lock:
        if not _inside:
            _before = gc.get_threshold()
            gc.set_threshold(max(_OBJECTS, _before[0]) if _before[0] else 0, *_before[1:])
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                gc.set_threshold(*_before)
