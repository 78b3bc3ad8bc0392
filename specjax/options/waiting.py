"""Shows a progress line with the elapsed seconds, at a terminal."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Shows `what` and the elapsed seconds on stderr at a terminal; clears the line at the end."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()

    def show() -> None:
        started = time.monotonic()
        while not done.wait(0.2):
            print(
                f"\r{what} ... {time.monotonic() - started:.0f} s ",
                end="",
                file=sys.stderr,
                flush=True,
            )
        print("\r\033[K", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
