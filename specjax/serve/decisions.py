"""An engine over several processes: process 0 decides, and all of them do what it says.

    process 0    queue, clock, clients    [7: read, insert, run 4, peek]
                                                 |                  one message a turn
    process 1    no queue, no clock       [7: read, insert, run 4, peek]

A decision is a call of `Device`, with numbers of the host as arguments, so every process runs the
same programs in the same order, which is what its devices need to work together.  Messages are
numbered and hashed in a chain, and each tells the hash of what process 0 saw last.  A process that
misses a message, gets one twice or in another order, or sees other tokens, raises `Diverged` and
ends, and the group ends with it: never with another text.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pickle
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.parallel import links
from specjax.serve.batch import Device, Row
from specjax.serve.news import News

BEAT = 0.5
"""Seconds between two signs of life of process 0."""

SILENCE = 30.0
"""Seconds without one, after which process 0 counts as gone."""

_CLOSE = "close"

Decision = tuple[str, tuple[Any, ...]]


class Diverged(Exception):
    """Raised in a process that cannot do what process 0 has decided."""


class Message(NamedTuple):
    """The decisions of a turn."""

    number: int  # from 0 on
    body: bytes  # the decisions; empty: a sign of life, and `number` is that of the next message
    chain: bytes  # a hash of this message and all before it
    seen: bytes  # a hash of what process 0 has seen from its devices, before this message


def chained(chain: bytes, number: int, body: bytes) -> bytes:
    """Returns the hash of a message after messages of the hash `chain`."""
    return hashlib.sha256(chain + number.to_bytes(8, "little") + body).digest()


class Sender:
    """Sends the messages of process 0 to all others."""

    def __init__(self, others: Sequence[socket.socket]) -> None:
        self._others, self._lock = others, threading.Lock()
        self._number, self._chain = 0, b""
        self._ended = threading.Event()
        threading.Thread(target=self._beat, name="specjax beat", daemon=True).start()

    def send(self, decisions: list[Decision], seen: bytes) -> None:
        """Sends the next message.

        Raises:
          OSError: another process has gone.
        """
        body = pickle.dumps(decisions)
        with self._lock:
            self._chain = chained(self._chain, self._number, body)
            self._write(Message(self._number, body, self._chain, seen))
            self._number += 1

    def close(self) -> None:
        self._ended.set()
        with self._lock:
            for other in self._others:
                other.close()

    def _write(self, message: Message) -> None:
        content = pickle.dumps(tuple(message))
        for other in self._others:
            other.sendall(len(content).to_bytes(8, "little") + content)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            with self._lock, contextlib.suppress(OSError):  # `send` reports it
                self._write(Message(self._number, b"", self._chain, b""))


class Receiver:
    """Reads the messages of process 0, and checks them."""

    def __init__(self, link: socket.socket) -> None:
        link.settimeout(SILENCE)
        self._link = link
        self._file = link.makefile("rb")
        self._number, self._chain = 0, b""

    def next(self) -> tuple[list[Decision], bytes]:
        """Returns the decisions of the next message, and the hash of what process 0 has seen.

        Raises:
          Diverged: a message was lost, changed, repeated or moved, or process 0 is gone.
        """
        while True:
            message = self._read()
            if message.number != self._number:
                fault = "was lost" if message.number > self._number else "came again"
                raise Diverged(
                    f"message {min(message.number, self._number)} of process 0 {fault}: got "
                    f"{message.number} instead of {self._number}"
                )
            if not message.body:
                if message.chain != self._chain:
                    raise Diverged(f"the messages before {self._number} are not process 0's")
                continue
            self._chain = chained(self._chain, self._number, message.body)
            if message.chain != self._chain:
                raise Diverged(f"message {self._number} of process 0 has changed on its way")
            self._number += 1
            return pickle.loads(message.body), message.seen

    def close(self) -> None:
        self._file.close()
        self._link.close()

    def _read(self) -> Message:
        try:
            size = int.from_bytes(self._exactly(8), "little")
            return Message(*pickle.loads(self._exactly(size)))
        except (OSError, EOFError) as error:
            raise Diverged(f"process 0 sends nothing any more ({error or 'closed'})") from None

    def _exactly(self, count: int) -> bytes:
        content = self._file.read(count)
        if len(content) < count:
            raise EOFError("its connection has closed")
        return content


class Doing:
    """Does decisions with a device, which works on one prompt at a time."""

    def __init__(self, device: Device) -> None:
        self._device, self._seen = device, b""
        self._reading: Any = None
        self._unseen: Callable[[], list[News]] | None = None

    @property
    def seen(self) -> bytes:
        """A hash of the news so far; it waits until the device has said them."""
        if self._unseen is not None:
            self._unseen()
        return self._seen

    def do(self, decisions: list[Decision]) -> Any:
        """Returns the result of the last decision."""
        result = None
        for name, arguments in decisions:
            result = getattr(self, f"_{name}")(*arguments)
        return result

    def _empty(self) -> None:
        self._reading = self._device.empty()

    def _copy(self, slot: int, count: int) -> None:
        self._reading = self._device.copy(slot, count)

    def _read(self, *arguments: Any) -> None:
        self._reading = self._device.read(self._reading, *arguments)

    def _insert(self, slot: int, row: Row) -> None:
        self._device.insert(slot, self._reading, row)
        self._reading = None

    def _end(self, ended: np.ndarray) -> None:
        self._device.end(ended)

    def _run(self, steps: int, live: np.ndarray, least: int, present: np.ndarray) -> None:
        self._device.run(steps, live, least, present)

    def _peek(self, length: np.ndarray, written: np.ndarray) -> Callable[[], list[News]]:
        waiting = self._device.peek(length, written)

        @functools.cache
        def news() -> list[News]:
            made, self._unseen = waiting(), None
            told = repr([(one.length, one.done, one.tokens) for one in made]).encode()
            self._seen = hashlib.sha256(self._seen + told).digest()
            return made

        self._unseen = news
        return news

    def _recorded(self, slot: int, start: int) -> Any:
        return self._device.recorded(slot, start)


class _Held:
    """Stands for a reading, which only `Doing` holds."""


class Leader:
    """`Device` in process 0, as the scheduler sees it: its calls are decisions of a turn.

    Nothing is computed before the others know of it.  They are told at the end of a turn (`tell`),
    and whenever the scheduler waits for a result.
    """

    def __init__(self, device: Device, sender: Sender) -> None:
        self._device, self._sender, self._doing = device, sender, Doing(device)
        self._decided: list[Decision] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def together(self, width: int) -> int:
        """Returns 1: the others work on one prompt at a time."""
        return 1

    def tell(self) -> Any:
        """Sends the decisions so far, does them, and returns the result of the last one."""
        decided, self._decided = self._decided, []
        if not decided:
            return None
        self._sender.send(decided, self._doing.seen)
        return self._doing.do(decided)

    def stop(self) -> None:
        """Ends the other processes' `follow`."""
        self._decided.append((_CLOSE, ()))
        decided, self._decided = self._decided, []
        try:
            with contextlib.suppress(OSError):
                self._sender.send(decided, self._doing.seen)
        finally:  # the devices may have failed, and nobody may wait for ever
            self._sender.close()

    def _decide(self, name: str, *arguments: Any) -> _Held:
        self._decided.append((name, arguments))
        return _Held()

    def empty(self) -> _Held:
        return self._decide("empty")

    def copy(self, slot: int, count: int) -> _Held:
        return self._decide("copy", slot, count)

    def read(self, reading: _Held, *arguments: Any) -> _Held:
        return self._decide("read", *arguments)

    def insert(self, slot: int, reading: _Held, row: Row) -> None:
        self._decide("insert", slot, row)

    def end(self, ended: np.ndarray) -> None:
        self._decide("end", ended)

    def run(self, steps: int, live: np.ndarray, least: int, present: np.ndarray) -> None:
        self._decide("run", steps, live, least, present)

    def peek(self, length: np.ndarray, written: np.ndarray) -> Callable[[], list[News]]:
        self._decide("peek", length, written)
        return self.tell()

    def recorded(self, slot: int, start: int) -> Any:
        self._decide("recorded", slot, start)
        return self.tell()


def follow(device: Device, receiver: Receiver) -> None:
    """Does what process 0 decides, until it closes its engine.

    Raises:
      Diverged: this process cannot go on as process 0 does.
    """
    doing = Doing(device)
    with contextlib.closing(receiver):
        while True:
            decisions, seen = receiver.next()
            if seen != doing.seen:
                raise Diverged(
                    "the tokens of this process are not those of process 0: do all processes have "
                    "the same weights and the same versions?"
                )
            closes = decisions[-1][0] == _CLOSE
            doing.do(decisions[:-1] if closes else decisions)
            if closes:
                return


def connected(number: int) -> Sender | Receiver:
    """Connects this process with the others, all of which call it."""
    made = links()
    return Sender([link for _, link in made]) if number == 0 else Receiver(made[0][1])


__all__ = ["Diverged", "Leader", "Receiver", "Sender", "connected", "follow"]
