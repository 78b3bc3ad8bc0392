"""Several processes that run one command together: they find each other, and none waits for one that is gone.

`jax.distributed` joins them, and ends a process whose peers are gone, with a stack of C++ for a message, after seconds
in which all hang in a collective.  So each keeps a socket to process 0 besides: the system closes it with the process,
whatever that was busy with, and who is left says so and ends.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import os
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

AUTO = "auto"
_DONE = "done"
_TIMEOUT = 60  # seconds in which all must have come
_HEARTBEAT = 30  # seconds after which a machine is given up that no longer answers
_MOMENT = 2  # seconds in which the end of another process is noticed
_STATUS = 2

_tell: Callable[[str], None] | None = None  # why this process ends, to the others


def join(
    coordinator: str, num_processes: int | None, process_id: int | None, timeout: float = _TIMEOUT
) -> None:
    """Become one of several processes; from now on only the first of them writes to stdout.

    Must come before anything asks JAX for a device.  A process that nobody joins, or that misses another later on,
    ends with a message and status 2.

    Args:
      coordinator: HOST:PORT of process 0; or "auto", which leaves to JAX what a cluster's environment says.
      num_processes: how many there are; None: the environment's JAX_NUM_PROCESSES, or as above.
      process_id: which of them this is; None: likewise JAX_PROCESS_ID.
      timeout: seconds that it may take.

    Raises:
      ValueError: a number that is missing or does not fit, or no cluster's environment.
    """
    host, _, port = coordinator.rpartition(":")
    if coordinator != AUTO and not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(
            f"--coordinator {coordinator} must look like HOST:PORT, of process 0; or be {AUTO}"
        )
    address = os.environ.get("JAX_COORDINATOR_ADDRESS") if coordinator == AUTO else coordinator
    count = _number("--num-processes", num_processes, "JAX_NUM_PROCESSES")
    number = _number("--process-id", process_id, "JAX_PROCESS_ID")
    if coordinator != AUTO:
        for name, value in (("--num-processes", count), ("--process-id", number)):
            if value is None:
                raise ValueError(f"--coordinator {coordinator} needs {name}")
    if count is not None and not 0 <= (number or 0) < count:
        raise ValueError(
            f"--process-id {number} of --num-processes {count}: they are counted from 0"
        )

    missing = f"the {count or ''} processes did not come together at {address or coordinator} within {timeout:g} s: "
    missing += "is each of them running, with the same --coordinator and --num-processes and its own --process-id, "
    missing += "and can they reach that host and port?"
    # JAX would abort with a stack of C++: its own time is longer.
    late = threading.Timer(timeout, _end, [missing])
    late.daemon = True
    late.start()
    given: dict[str, Any] = {
        "initialization_timeout": int(timeout) + 30,
        "heartbeat_timeout_seconds": _HEARTBEAT,
    }
    if "shutdown_timeout_seconds" in inspect.signature(jax.distributed.initialize).parameters:
        given["shutdown_timeout_seconds"] = _HEARTBEAT
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Gloo tells on stdout whom it has found: that goes to stderr now, and what Python prints where it went.
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(stdout, "w", buffering=1)
    try:
        jax.distributed.initialize(address, count, number, **given)
    except (ValueError, RuntimeError) as error:
        if coordinator == AUTO and "be defined" in str(error):
            error = f"no cluster that JAX knows has started this process ({error}): pass HOST:PORT of process 0, "
            error += "--num-processes and --process-id instead"
        raise ValueError(f"--coordinator {coordinator}: {error}") from None
    count, number = jax.process_count(), jax.process_index()
    if number:
        sys.stdout = open(os.devnull, "w")
    _connect(host, count, number)
    late.cancel()


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="of the first of several processes that run this command, or auto: a cluster's environment says",
    )
    parser.add_argument("--num-processes", type=int, help="how many; without it JAX_NUM_PROCESSES")
    parser.add_argument(
        "--process-id", type=int, help="which of them this is, from 0; without it JAX_PROCESS_ID"
    )


def join_from(options: dict[str, Any]) -> None:
    """`join`, where the options of a command ask for it: coordinator, num_processes and process_id.

    Raises:
      ValueError: as `join`, or a number without a coordinator.
    """
    names = ("coordinator", "num_processes", "process_id")
    coordinator, count, number = (options.get(name) for name in names)
    if coordinator is not None:
        join(coordinator, count, number)
    elif (count, number) != (None, None):
        raise ValueError(
            "--num-processes and --process-id are used with --coordinator HOST:PORT; add it"
        )


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """Around all that a command does: a process of several that fails tells the others, and waits for none."""
    try:
        yield
    except BaseException as error:
        if _tell is None:
            raise
        asked = isinstance(error, SystemExit)
        if not asked:
            traceback.print_exc()
        # Whatever failed, a checkpoint perhaps, may have failed for want of another process: who watches that one says
        # so and ends this one.
        _flush()
        time.sleep(_MOMENT)
        cause = error.__context__ if asked and error.__context__ is not None else error
        _tell(f"it has stopped: {cause!r}".replace("\n", " "))
        _flush()
        os._exit(
            error.code if asked and isinstance(error.code, int) else 1
        )  # without JAX's barrier at the exit
    if _tell is not None:
        _tell(_DONE)


def _number(option: str, given: int | None, variable: str) -> int | None:
    text = os.environ.get(variable)
    if given is not None or text is None:
        return given
    if not text.isdecimal():
        raise ValueError(f"{variable}={text} in the environment; it must be a number, as {option}")
    return int(text)


def _connect(host: str, count: int, number: int) -> None:
    """Sockets between process 0 and each other one, and a thread that listens to each."""
    global _tell
    lock = threading.Lock()

    def lost(who, why):
        return (
            f"process {who} of {count} is gone ({why}), and process {number} cannot go on without it: start the "
            f"command again with the processes that remain, --num-processes {count - 1} and a --mesh of their devices; "
            "training resumes from its last checkpoint"
        )

    def send(link, text):
        with contextlib.suppress(OSError), lock:
            link.sendall(f"{text}\n".encode())

    server, secret = socket.socket(), secrets.token_hex(16)
    if number == 0:
        server.bind(("", 0))
        server.listen(count)
        host = host or socket.gethostbyname(socket.gethostname())
    text = f"{host} {server.getsockname()[1] if number == 0 else 0} {secret}".encode()
    told = multihost_utils.broadcast_one_to_all(np.frombuffer(text.ljust(512), np.uint8))
    host, port, secret = bytes(np.asarray(told).astype(np.uint8)).decode().split()

    if number:
        link = _alive(socket.create_connection((host, int(port)), _TIMEOUT))
        send(link, f"{secret} {number}")

        def listen():
            for line in _lines(link.makefile()):
                if line == _DONE:
                    return
                who, _, why = line.partition(" ")
                _end(lost(who, why))
            _end(lost(0, "its connection has closed"))

        _tell = functools.partial(send, link)
        threading.Thread(target=listen, daemon=True).start()
        return

    others: dict[int, tuple[socket.socket, Any]] = {}

    def tell_all(text):
        for link, _ in others.values():
            send(link, text if text == _DONE else f"0 {text}")

    def attend(who, lines):
        for line in _lines(lines):
            if line == _DONE:
                return
            why = line
            break
        else:
            why = "its connection has closed"
        for link, _ in others.values():
            send(link, f"{who} {why}")
        time.sleep(0.5)  # they end with that message, rather than with the end of this process
        _end(lost(who, why))

    while len(others) < count - 1:
        link = _alive(server.accept()[0])
        lines = link.makefile()
        found, _, who = lines.readline().strip().partition(" ")
        if found == secret and who.isdecimal():
            others[int(who)] = link, lines
    server.close()
    _tell = tell_all
    for who, (_, lines) in others.items():
        threading.Thread(target=attend, args=[who, lines], daemon=True).start()


def _alive(link: socket.socket) -> socket.socket:
    """A socket that breaks when the other machine is silent for about `_HEARTBEAT` seconds."""
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _HEARTBEAT // 3),
        ("TCP_KEEPINTVL", _HEARTBEAT // 6),
        ("TCP_KEEPCNT", 4),
    ):
        if hasattr(socket, name):  # not every system counts
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return link


def _lines(lines: Any) -> Iterator[str]:
    with contextlib.suppress(OSError, ValueError):
        for line in lines:
            yield line.strip()


def _end(message: str) -> NoReturn:
    print(f"specjax: {message}", file=sys.stderr)
    _flush()
    os._exit(_STATUS)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
