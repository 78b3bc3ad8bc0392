"""Ends a command with a line on stderr for an error that a user can fix, without a traceback."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator

FIXABLE = (ValueError, OSError, ImportError, FloatingPointError)
"""Errors whose message gives a user the fix."""

_CLOSED = 141  # as a shell reports a program whose reader has gone
_INTERRUPTED = 130


def open_streams() -> None:
    """Gives a process that was started with closed streams (`>&-`) streams that discard everything.

    Otherwise `sys.stdout` is None, and the next file that is opened gets the number of a stream, so
    that a library's message would be written into it.  A character that stdout cannot encode is
    escaped.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def ending(name: str) -> Iterator[None]:
    """Wraps a command.

    A `FIXABLE` error is printed as a line that begins with `name`, and the exit status is 2.  If
    the reader of stdout has gone, the command ends silently with status 141, and after Ctrl-C
    with status 130.
    """
    try:
        try:
            yield
            sys.stdout.flush()  # an error of the last lines is reported like any other
        except BrokenPipeError:
            if _muted():
                sys.exit(_CLOSED)
            raise
    except FIXABLE as error:
        _muted()
        say(f"{name}: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        _muted()
        say(f"{name}: interrupted")
        sys.exit(_INTERRUPTED)


def say(text: str) -> None:
    """Prints a line on stderr, if anyone still reads it."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _muted() -> bool:
    """Returns whether stdout can no longer be written to; then it is discarded from now on."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        # Python writes what is left in the buffer when it exits, and would complain again.
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        return True
    return False
