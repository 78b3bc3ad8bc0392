"""Several processes that run one command together, and all end when one of them fails.

`jax.distributed` connects them.  If one process ends, the others hang in a collective for some
time, and then `jax.distributed` ends them with a C++ stack trace.  So each process also keeps a
socket to process 0.  The operating system closes the socket when the process ends, however it ends.
Then the remaining processes print a clear message and end.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TextIO

import jax
import numpy as np
from jax.experimental import multihost_utils

AUTO = "auto"
_DONE = "done"
_TIMEOUT = 60  # seconds in which all processes must have joined
_HEARTBEAT = 30  # seconds after which a machine that does not answer counts as gone
_MOMENT = 2  # seconds within which the end of another process is noticed
_ADDRESSES = 8  # of process 0, which the others try one after the other
_STATUS = 2  # the exit status if another process is gone

_tell: Callable[[str], None] | None = None  # sends the other processes why this one ends


def join(
    coordinator: str, num_processes: int | None, process_id: int | None, timeout: float = _TIMEOUT
) -> None:
    """Joins a group of processes; from now on only the first of them writes to stdout.

    Call it before anything uses a JAX device.  If the group does not come together, or another
    process fails later on, this process ends with a message and status 2.

    Args:
      coordinator: HOST:PORT of process 0, or "auto": JAX reads the environment of a cluster.
      num_processes: the number of processes; by default JAX_NUM_PROCESSES in the environment, or
        with "auto" the number that the cluster gives.
      process_id: the number of this process, from 0; by default JAX_PROCESS_ID, or with "auto" the
        number that the cluster gives.
      timeout: seconds until all processes must have joined.

    Raises:
      ValueError: a number is missing or out of range, or "auto" finds no cluster.
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

    missing = (
        f"the {count or ''} processes did not come together at {address or coordinator} within "
        f"{timeout:g} s: is each of them running, with the same --coordinator and --num-processes "
        "and its own --process-id, and can they reach that host and port?"
    )
    # At its own timeout JAX would abort with a C++ stack trace, so that timeout is longer.
    late = threading.Timer(timeout, _end, [missing])
    late.daemon = True
    late.start()
    timeouts: dict[str, Any] = {
        "initialization_timeout": int(timeout) + 30,
        "heartbeat_timeout_seconds": _HEARTBEAT,
    }
    if "shutdown_timeout_seconds" in inspect.signature(jax.distributed.initialize).parameters:
        timeouts["shutdown_timeout_seconds"] = _HEARTBEAT
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Gloo prints to stdout.  Send that to stderr, but Python's own output still to stdout.
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(stdout, "w", buffering=1)
    try:
        jax.distributed.initialize(address, count, number, **timeouts)
    except (ValueError, RuntimeError) as error:
        if coordinator == AUTO and "be defined" in str(error):
            error = (
                f"no cluster that JAX knows has started this process ({error}): pass HOST:PORT of "
                "process 0, --num-processes and --process-id instead"
            )
        raise ValueError(f"--coordinator {coordinator}: {error}") from None
    count, number = jax.process_count(), jax.process_index()
    if number:
        sys.stdout = open(os.devnull, "w")
    _connect(host, count, number)
    late.cancel()


def join_from(options: Mapping[str, Any]) -> None:
    """Calls `join` if the options of a command have a coordinator.

    The options that it uses are coordinator, num_processes and process_id.

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
    """Wraps a whole command: if this process fails, it notifies the others and ends at once."""
    try:
        yield
    except BaseException as error:
        if _tell is None:
            raise
        asked = isinstance(error, SystemExit)
        if not asked:
            traceback.print_exc()
        # The error may only be a consequence of another process being gone.  Then the thread that
        # watches that process ends this one, with the better message.
        _flush()
        time.sleep(_MOMENT)
        cause = error.__context__ if asked and error.__context__ is not None else error
        _tell(f"it has stopped: {cause!r}".replace("\n", " "))
        _flush()
        # A normal exit would wait for the others in JAX's barrier.
        os._exit(error.code if asked and isinstance(error.code, int) else 1)
    if _tell is not None:
        _tell(_DONE)


def _number(option: str, value: int | None, variable: str) -> int | None:
    """Returns the value of an option, or else of an environment variable."""
    text = os.environ.get(variable)
    if value is not None or text is None:
        return value
    if not text.isdecimal():
        raise ValueError(f"{variable}={text} in the environment; it must be a number, as {option}")
    return int(text)


def _connect(host: str, count: int, number: int) -> None:
    """Opens a socket from process 0 to each other process, and a thread that listens to each."""
    global _tell
    lock = threading.Lock()

    def lost(who: int | str, why: str) -> str:
        return (
            f"process {who} of {count} is gone ({why}), and process {number} cannot go on without "
            "it: start the command again with the processes that remain, "
            f"--num-processes {count - 1} and a --mesh of their devices; training resumes from its "
            "last checkpoint"
        )

    def send(link: socket.socket, text: str) -> None:
        with contextlib.suppress(OSError), lock:
            link.sendall(f"{text}\n".encode())

    made = links(host)
    if number:
        [(_, link)] = made

        def listen() -> None:
            for line in _lines(link.makefile()):
                if line == _DONE:
                    return
                who, _, why = line.partition(" ")
                _end(lost(who, why))
            _end(lost(0, "its connection has closed"))

        _tell = functools.partial(send, link)
        threading.Thread(target=listen, daemon=True).start()
        return

    others = {who: (link, link.makefile()) for who, link in made}

    def tell_all(text: str) -> None:
        for link, _ in others.values():
            send(link, text if text == _DONE else f"0 {text}")

    def attend(who: int, lines: TextIO) -> None:
        for line in _lines(lines):
            if line == _DONE:
                return
            why = line
            break
        else:
            why = "its connection has closed"
        for link, _ in others.values():
            send(link, f"{who} {why}")
        time.sleep(0.5)  # so that they read this message before the connection closes
        _end(lost(who, why))

    _tell = tell_all
    for who, (_, lines) in others.items():
        threading.Thread(target=attend, args=[who, lines], daemon=True).start()


def links(host: str = "") -> list[tuple[int, socket.socket]]:
    """Connects process 0 with each other process by a socket.

    All processes call it together, after `join`.

    Args:
      host: of process 0; by default its own addresses are tried.

    Returns:
      In process 0 the number and the socket of each other process, and in each of these those of
      process 0.
    """
    count, number = jax.process_count(), jax.process_index()
    server, secret = socket.socket(), secrets.token_hex(16)
    hosts = [host] if host else []
    if number == 0:
        server.bind(("", 0))
        server.listen(count)
        hosts = hosts or own_addresses()
    port = server.getsockname()[1] if number == 0 else 0
    text = " ".join([str(port), secret, *hosts]).encode()
    received = multihost_utils.broadcast_one_to_all(np.frombuffer(text.ljust(512), np.uint8))
    port, secret, *hosts = bytes(np.asarray(received).astype(np.uint8)).decode().split()
    if number:
        link = _alive(_reach(hosts, int(port)))
        with contextlib.suppress(OSError):
            link.sendall(f"{secret} {number}\n".encode())
        return [(0, link)]
    others: dict[int, socket.socket] = {}
    server.settimeout(_TIMEOUT)
    while len(others) < count - 1:
        link = server.accept()[0]
        if (who := _introduced(link, secret)) is None:
            link.close()
            continue
        others[who] = _alive(link)
    server.close()
    return sorted(others.items())


def own_addresses() -> list[str]:
    """Returns addresses at which other machines may reach this one, the best first.

    The host's own name often stands for a loopback address such as 127.0.1.1, which leads every
    machine to itself.
    """
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # The system chooses the address from which it would send; nothing is sent.
        probe.connect(("192.0.2.1", 9))
        found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found += socket.gethostbyname_ex(socket.gethostname())[2]
    found = list(dict.fromkeys([*found, "127.0.0.1"]))
    return sorted(found, key=lambda address: address.startswith("127."))[:_ADDRESSES]


def _reach(hosts: Sequence[str], port: int) -> socket.socket:
    """Returns a connection to the first of these addresses that answers.

    Raises:
      OSError: none of them answers.
    """
    for host in hosts[:-1]:
        with contextlib.suppress(OSError):
            return socket.create_connection((host, port), _TIMEOUT / len(hosts))
    return socket.create_connection((hosts[-1], port), _TIMEOUT)


def _introduced(link: socket.socket, secret: str) -> int | None:
    """Returns the number of the process at the other end; None for any other client."""
    link.settimeout(_MOMENT)
    line = b""
    with contextlib.suppress(OSError):
        # Byte by byte, so that what follows the line stays in the socket.
        while len(line) < 100 and not line.endswith(b"\n") and (byte := link.recv(1)):
            line += byte
    shown, _, who = line.decode(errors="replace").strip().partition(" ")
    return int(who) if shown == secret and who.isdecimal() else None


def _alive(link: socket.socket) -> socket.socket:
    """Makes a socket break when the other machine is silent for about `_HEARTBEAT` seconds."""
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _HEARTBEAT // 3),
        ("TCP_KEEPINTVL", _HEARTBEAT // 6),
        ("TCP_KEEPCNT", 4),
    ):
        if hasattr(socket, name):  # not every system has these options
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return link


def _lines(lines: TextIO) -> Iterator[str]:
    """Yields lines until the connection ends, with or without an error."""
    with contextlib.suppress(OSError, ValueError):
        for line in lines:
            yield line.strip()


def _end(message: str) -> NoReturn:
    """Prints a message and ends this process at once, without JAX's barrier."""
    print(f"specjax: {message}", file=sys.stderr)
    _flush()
    os._exit(_STATUS)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
