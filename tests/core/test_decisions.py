"""The messages of an engine over several processes, between two threads: each fault is found."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from specjax.serve import decisions
from specjax.serve.decisions import Diverged, Leader, Message, Receiver, Sender, follow
from specjax.serve.handle import Counts
from specjax.serve.news import News

TURNS = 6
FAULTS = {
    "lost": "message 2 of process 0 was lost", "moved": "message 2 of process 0 was lost",
    "repeated": "message 2 of process 0 came again", "changed": "message 2 of process 0 has chang",
    "last": "message 6 of process 0 was lost", "cut": "sends nothing any more",
    "silent": "sends nothing any more",
}  # fmt: skip


class Planted(Sender):
    """Does something to message 2, or to the last one."""

    def __init__(self, other: socket.socket, fault: str) -> None:
        self.fault, self._kept, self._link = fault, None, other
        super().__init__([other])

    def _write(self, message: Message) -> None:
        at = message.number if message.body else None
        if (self.fault, at) in (("lost", 2), ("last", TURNS)):
            return
        if self.fault == "silent" and (at is None or at >= 2):
            return
        if (self.fault, at) == ("cut", 2):
            self._link.shutdown(socket.SHUT_RDWR)
        if (self.fault, at) == ("moved", 2):
            self._kept = message
            return
        if (self.fault, at) == ("changed", 2):
            message = message._replace(body=pickle.dumps([("empty", ())]))
        super()._write(message)
        if (self.fault, at) == ("repeated", 2):
            super()._write(message)
        if self._kept is not None and at == 3:
            super()._write(self._kept)


class Toy:
    """A device that writes down its calls; its tokens follow from them."""

    def __init__(self, other_from: int = 99) -> None:
        self.calls: list[Any] = []
        self.peeks, self.other_from = 0, other_from

    def empty(self) -> str:
        self.calls.append("empty")
        return "reading"

    def read(self, reading: str, *given: Any) -> str:
        assert reading == "reading"
        self.calls.append(("read", given))
        return reading

    def insert(self, slot: int, reading: str, row: Any) -> None:
        assert reading == "reading"
        self.calls.append((slot, row))

    def end(self, ended: np.ndarray) -> None:
        self.calls.append(ended.tolist())

    def run(self, steps: int, live: np.ndarray, least: int, present: np.ndarray) -> None:
        self.calls.append((steps, live.tolist(), least, present.tolist()))

    def peek(self, length: np.ndarray, written: np.ndarray) -> Callable[[], list[News]]:
        self.peeks += 1
        token = len(self.calls) + (self.peeks >= self.other_from)
        news = [News(int(length[0]) + 1, False, [token], [0], (0,) * len(Counts._fields))]
        return lambda: news


def run(fault: str = "none", other_from: int = 99) -> tuple[Toy, Toy, Exception | None]:
    """The devices of process 0 and of the other one, and how that one has ended."""
    ours, theirs = socket.socketpair()
    one, other, found = Toy(), Toy(other_from), []

    def following() -> None:
        try:
            follow(other, Receiver(theirs))  # pyright: ignore[reportArgumentType]
        except Diverged as error:
            found.append(error)

    thread = threading.Thread(target=following)
    thread.start()
    sender = Planted(ours, fault)
    leader = Leader(one, sender)  # pyright: ignore[reportArgumentType]
    with contextlib.suppress(OSError):
        for turn in range(TURNS):
            row: Any = f"row {turn}"
            reading = leader.read(leader.empty(), np.arange(turn), 0, 8, frozenset())
            leader.insert(turn % 2, reading, row)
            leader.end(np.array([False, True]))
            leader.run(2, np.array([True, False]), 1, np.array([True, True]))
            assert len(one.calls) == 5 * turn  # nothing is done before the others are told
            news = leader.peek(np.array([turn]), np.array([0]))()
            assert news[0].tokens == [5 * (turn + 1)]
        if fault == "last":
            leader.end(np.array([True, True]))
            leader.tell()  # nothing is sent behind it but signs of life
        else:
            leader.stop()
    thread.join(30)
    assert not thread.is_alive()
    sender.close()
    return one, other, found[0] if found else None


def test_the_others_do_what_process_0_does(monkeypatch):
    monkeypatch.setattr(decisions, "BEAT", 0.001)  # many signs of life in between
    one, other, error = run()
    assert error is None
    assert repr(one.calls) == repr(other.calls) and len(one.calls) == 5 * TURNS


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults(monkeypatch, fault):
    """The process that sees one does nothing from there on, and says what it saw."""
    monkeypatch.setattr(decisions, "BEAT", 0.05)
    monkeypatch.setattr(decisions, "SILENCE", 1.0)
    one, other, error = run(fault)
    assert FAULTS[fault] in str(error)
    done = {"last": 5 * TURNS, "repeated": 15}.get(fault, 10)
    assert repr(other.calls) == repr(one.calls[:done])


def test_other_tokens_are_found():
    """Planted: the devices of the other process give another token in turn 3."""
    _, other, error = run(other_from=3)
    assert "are not those of process 0" in str(error) and other.peeks == 3


def test_the_others_are_let_go_when_a_device_has_failed(monkeypatch):
    """Process 0 does not know its own tokens then: it hangs up, and gives no more signs of life."""
    ours, theirs = socket.socketpair()
    leader, broken = Leader(Toy(), Sender([ours])), RuntimeError("out of memory")  # type: ignore

    def news() -> list[News]:
        raise broken

    monkeypatch.setattr(Toy, "peek", lambda *_: news)
    waiting = leader.peek(np.array([0]), np.array([0]))
    with pytest.raises(RuntimeError, match="out of memory"):
        waiting()
    with pytest.raises(RuntimeError, match="out of memory"):
        leader.stop()
    theirs.close()
    assert ours.fileno() == -1 and leader._sender._ended.is_set()


def test_a_message_is_sent_each_turn():
    """However many decisions it has."""
    sent = []

    class Counting(Sender):
        def _write(self, message: Message) -> None:
            sent.extend([message] if message.body else [])

    leader = Leader(Toy(), Counting([]))  # pyright: ignore[reportArgumentType]
    for turn in range(3):
        leader.insert(0, leader.read(leader.empty(), 0), "row")  # pyright: ignore
        leader.run(4, np.array([True]), 4, np.array([True]))
        leader.peek(np.array([turn]), np.array([0]))
    leader.tell()
    assert [message.number for message in sent] == [0, 1, 2]
    leader.stop()
