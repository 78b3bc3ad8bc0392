"""Locks a folder, so that only one run at a time uses it."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import pathlib
import socket
import threading
from collections.abc import Iterator

from specjax.parallel import leader

_NAME = "run.lock"

_held: set[tuple[pathlib.Path, int]] = set()
"""The folders that a thread of this process holds: a job locks its folder, and its loop again."""


@contextlib.contextmanager
def alone(out: str | os.PathLike[str], writes: bool = True) -> Iterator[None]:
    """Holds a folder for one run, until the block or the process ends, however it ends.

    Of several processes of one run, the first one holds the lock.  A caller that writes nothing
    there (`writes=False`) does not hold it.

    Raises:
      ValueError: another run holds the folder; the message names it.
    """
    folder = pathlib.Path(out).absolute()
    key = folder.resolve(), threading.get_ident()
    if key in _held or not leader() or not writes:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / _NAME, "a+") as file:
        try:
            # The system drops this lock together with the process that holds it.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"another run is writing to --out {out} ({file.read().strip() or 'just begun'}): "
                "wait until it has ended, stop it, or choose another --out"
            ) from None
        except OSError as error:
            print(f"{folder / _NAME} cannot be locked ({error}): start no second run", flush=True)
        now = datetime.datetime.now(datetime.UTC).isoformat(" ", "seconds")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {now}\n")
        file.flush()
        _held.add(key)
        try:
            yield
        finally:
            _held.discard(key)
