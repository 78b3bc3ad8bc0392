"""Locks a folder, so that only one run at a time uses it."""

from __future__ import annotations

import contextlib
import datetime
import os
import pathlib
import socket
from collections.abc import Iterator

from specjax._internal.extras import need
from specjax.parallel import leader

_LOCK, _HOLDER = "run.lock", "run.holder"


@contextlib.contextmanager
def alone(out: str | os.PathLike[str], writes: bool = True) -> Iterator[None]:
    """Holds a folder for one run, until the block or the process ends, however it ends.

    Of several processes of one run, the first one holds the lock.  A caller that writes nothing
    there (`writes=False`) does not hold it.  A thread may hold it several times: a job locks its
    folder, and its loop again.

    Raises:
      ValueError: another run holds the folder, which the message names; or a package of the extra
        `train` is missing.
    """
    for package in ("filelock", "grain"):  # imported where they are used: a help page needs neither
        need(package, "a training job", "train")
    import filelock

    if not leader() or not writes:
        yield
        return
    folder = pathlib.Path(out).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    # One object for each folder counts how often a thread holds it.
    lock, holder = filelock.FileLock(folder.resolve() / _LOCK, is_singleton=True), folder / _HOLDER
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(lock.acquire(timeout=0))
        except filelock.Timeout:
            known = holder.read_text().strip() if holder.exists() else "just begun"
            raise ValueError(
                f"another run is writing to --out {out} ({known}): "
                "wait until it has ended, stop it, or choose another --out"
            ) from None
        except OSError as error:
            print(f"{folder / _LOCK} cannot be locked ({error}): start no second run", flush=True)
        now = datetime.datetime.now(datetime.UTC).isoformat(" ", "seconds")
        holder.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {now}\n")
        yield
