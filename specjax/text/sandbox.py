"""Runs templates and tokenizers from untrusted files in a process with limits.

A limit inside this process would not work: one operator (`10 ** 100000000`), one filter or one
regular expression runs in C for hours or allocates gigabytes, and Rust ends the process when it
cannot allocate.  So a child does the work, and the operating system limits its processor time and
memory.  It is started afresh and not forked, because a fork of a process with threads (JAX has
many) may hang.  It is kept for later requests, so that one of them takes a fraction of a
millisecond.
"""

from __future__ import annotations

import atexit
import json
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from specjax._internal.checks import reworded
from specjax.text import confined

SECONDS = {"expressions": 10.0, "templates": 5.0, "tokenizers": 10.0}
"""Processor time of each job for one request, in seconds; each 10^6 bytes add one second."""

_WAIT = 60.0  # seconds by the clock that a request may take; a busy machine gives it a part of them


class _Child:
    """A confined process for one job."""

    def __init__(self, job: str) -> None:
        # Not the current folder, which Python has in its path as "": it may be a model's folder.
        paths = json.dumps([path for path in sys.path if os.path.isabs(path)])
        command = [sys.executable, "-I", "-S", confined.__file__, job, paths]
        quiet = {"TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **quiet},
            cwd=pathlib.Path(confined.__file__).parent,
        )
        self.late = False

    def ask(self, seconds: float, request: bytes) -> bytes:
        """Returns the answer; a prefix of it, or nothing, if the child ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        timer = threading.Timer(_patience(seconds), self._stop)
        timer.daemon = True
        timer.start()
        try:
            head = json.dumps({"seconds": seconds, "length": len(request)})
            self.process.stdin.write(head.encode() + b"\n" + request)
            self.process.stdin.flush()
            return self.process.stdout.readline(16 * confined.LONGEST)
        except OSError:  # it ended while it was written to
            return b""
        finally:
            timer.cancel()

    def _stop(self) -> None:
        self.late = True
        self.process.kill()

    def close(self) -> int:
        """Ends the child.  Returns the exit status, negative for a signal."""
        self.process.kill()
        for stream in (self.process.stdin, self.process.stdout):
            try:
                if stream is not None:
                    stream.close()
            except OSError:  # what was not yet written
                pass
        return self.process.wait()


_children: dict[str, _Child] = {}
_lock = threading.Lock()


def _forget() -> None:
    """Forgets the children in a forked process, and a lock that another thread may hold."""
    global _lock
    _lock = threading.Lock()
    _children.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def close() -> None:
    """Ends the children.  The next request starts new ones."""
    with _lock:
        for job in list(_children):
            _children.pop(job).close()


atexit.register(close)


def ask(
    job: str,
    subject: str,
    cure: str,
    request: bytes,
    refusals: Mapping[str, str],
) -> dict[str, Any]:
    """Returns the answer of `confined.JOBS[job]`.

    Args:
      job: its name.
      subject: the cause if the request cannot be answered, for the message.
      cure: the advice in that case.
      request: bytes for the job.
      refusals: the sentence after the subject for each key by which the job refuses a request; {}
        stands for the value of that key.

    Raises:
      ValueError: the job refuses the request, or the request takes too long or too much memory, or
        ends its process.
    """
    seconds = SECONDS[job] + len(request) / 1e6
    with _lock:
        child = _children.pop(job, None)
        if child is None or child.process.poll() is not None:
            if child is not None:
                child.close()
            child = _start(job, subject)
        line, status = b"", 0
        try:
            line = child.ask(seconds, request)
        finally:  # also when this thread is interrupted, since an answer would be left in the pipe
            if line.endswith(b"\n") and not child.late:
                _children[job] = child
            else:
                status = child.close()
    if not line.endswith(b"\n"):
        limit = f"{seconds:.2g} s of processor time"
        if child.late:
            reason = f"was not done after {_patience(seconds):.3g} s"
            cure = "try again when this machine is less busy. If it is not busy, " + cure
        elif status == -_PROFILE:
            reason = f"takes more than {limit}"
        else:
            reason = f"needs too much memory or ends its process (exit status {status})"
        raise ValueError(f"{subject} {reason}: {cure}")
    answer = json.loads(line)
    if "memory" in answer:
        answer["memory"] /= 2**30
    for key, sentence in {"memory": f"needs more than {{:.2g}} GiB: {cure}", **refusals}.items():
        if key in answer:
            raise ValueError(f"{subject} {sentence.format(answer[key])}")
    return answer


def _patience(seconds: float) -> float:
    """Returns the seconds to wait for a request with `seconds` of processor time."""
    return max(_WAIT, 2 * seconds)


_PROFILE = 27  # SIGPROF on Linux and macOS


def _start(job: str, subject: str) -> _Child:
    with reworded(
        f"{subject} is handled in a process of its own, which {sys.executable!r} cannot start (",
        "): run specjax with a Python that may start processes",
        (OSError, ValueError),
    ):
        return _Child(job)
