"""`Scheduler`: the thread of an engine, which reads prompts, runs steps and delivers tokens.

    queue -> prompts that are read in chunks -> slots of the batch -> the handles

A turn reads chunks of prompts and then runs a few steps of the batch.  The device has the next turn
before the host reads the tokens of this one, so it does not wait for the host.  Who has left is
known a turn late, and a row that is done changes no more.  While a slot is free a turn of a CPU has
half as many steps, and the device is asked for it in the middle of the one before: a request that
comes until then is read first.  Rows that draft end at steps of their own, and so do rows of which
some have many more tokens left than others.  Then a turn of a CPU ends with a row, and so does the
turn after it, which the device has been asked for already: it takes only the steps in which the
host learns of the end.

While texts are written a turn reads one chunk, and more of them as long as it takes at most two and
a half times as long as a turn without reading, so that no text waits long.  While no text is
written, a turn reads half as many chunks as there are slots, or eight, and the first steps of these
prompts are taken together.  An engine over several processes waits for each turn, since their news
are compared.

With pages a pass reads chunks of several prompts.  A chunk has the width that its own prompt gives
it, only chunks of one width are read together, and only if the device gives each of them the bits
that it has alone (`Device.together`).

One file: the parts of a turn change the same slots and the same queue, which only its thread may.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from specjax.decoding import Logprobs
from specjax.generation import Prepared
from specjax.serve.batch import MOST_STEPS, ROWS, Device, Row
from specjax.serve.handle import Busy, Closed, Counts, End, Handle
from specjax.serve.news import News
from specjax.serve.paging import Paging, Running
from specjax.serve.reading import Reading, prompt_passes

_T = TypeVar("_T")

_New = tuple[list[int], list[int], int, Logprobs | None]
"""The arguments of `Handle.extend` for new tokens."""

_NO_COUNTS = (0,) * len(Counts._fields)

_READING = 2.5
"""The most seconds of a turn that reads while texts are written, in those of one that does not."""

_TOGETHER = 8
"""The chunks of prompts that a turn reads before the first steps of their texts (8), if no text is
written; half as many as there are slots if that is more.
"""

_LOOK = 0.05
"""Seconds between two looks at cancelled requests while the engine is paused."""

_HOST_SHARE = {True: 0.05, False: 0.5}
"""The largest share of a turn in which the host works, where it has the cores of the device (True)
and where it does not.
"""

_LONGEST = 0.04
"""The most seconds of a turn, as far as its steps can be cut: who comes waits for its end.

After a turn the host and its clients take time on the cores of a CPU, so with fewer turns the steps
have more of it.
"""

_OF_A_TEXT = 1 / 8
"""The longest turn while a request waits, as a share of the mean time of a text: a row may end
early, and its slot is idle until the next turn.
"""

_ANSWER = 0.005
"""The seconds of a turn in which a row is done from the beginning: in them the host learns of it,
and who got its text sends the next request.
"""

_LONGER = 1.2
"""The most steps of a turn in those that turns have taken lately: many end early where many rows
are done, and a few long ones between them would make a text stutter.
"""

_ASKED_BEFORE = 0.5
"""The share of a turn after which the next one is asked for, while a slot is free: a request that
comes before is read first.
"""


@dataclasses.dataclass(eq=False)
class Admission:
    """A request that waits for a slot."""

    row: Row
    prepared: Prepared
    handle: Handle
    salt: str | None = None  # as for `Engine.submit`
    number: int = 0  # in the order in which requests came
    reading: Reading | None = None
    left: list[tuple[int, np.ndarray, int]] = dataclasses.field(default_factory=list)
    pages: list[int] = dataclasses.field(default_factory=list)  # until the row has a slot
    passes: int = 0  # over its prompt so far
    marks: frozenset[int] = frozenset()  # the tokens after which a snapshot is wanted
    snapshots: dict[int, Reading] = dataclasses.field(default_factory=dict)
    counts: tuple[int, ...] = _NO_COUNTS  # the fields of `Stats`, of a row that was set back


@dataclasses.dataclass(eq=False)
class _Slot:
    """A slot, and the request in it."""

    handle: Handle | None = None
    prepared: Prepared | None = None
    admission: Admission | None = None
    length: int = 0  # of prompt and output, as the host knows it
    written: int = 0  # tokens, by the device
    trusted: int = 0  # tokens of output that were read with the prompt
    counts: tuple[int, ...] = _NO_COUNTS  # the fields of `Stats`
    # What the slot was filled with; it stays after the request has ended.
    prompt: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    uses: frozenset[int] = frozenset()  # the parts that have read this prompt
    salt: str | None = None


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A turn that the device has been asked for, and whose news the host has not read."""

    news: Callable[[], list[News]]
    slots: list[_Slot | None]  # that took part
    length: list[int]  # of the rows, as the host knew it
    steps: int
    least: int  # steps once one of the rows is done
    reads: bool  # chunks of prompts in the same turn
    logprobs: dict[int, Callable[[], Logprobs | None]]  # of the new tokens, by slot

    @property
    def expected(self) -> int:
        """The steps of the turn by what is known now: a row may have been done before them."""
        ended = any(slot is not None and slot.handle is None for slot in self.slots)
        return self.least if ended else self.steps


@dataclasses.dataclass(frozen=True)
class _Undelivered:
    """What the device has said of a row, until its text is delivered."""

    number: int  # of the slot
    slot: _Slot  # which may be free by now, if the row is done
    handle: Handle
    prepared: Prepared
    new: News
    length: int  # of prompt and output before
    written: int  # tokens before, by the device
    recorded: Logprobs | None  # of the new tokens


@dataclasses.dataclass(frozen=True)
class Load:
    """The numbers of waiting and running requests of an engine, and its counts so far."""

    running: int
    waiting: int
    finished: int
    cancelled: int
    prompt_tokens: int
    copied_tokens: int  # of them
    host_share: float  # of the time of recent turns, with the starting of programs
    steps: int  # of the next turn
    pages: int = 0  # of the caches, in an engine with pages
    free_pages: int = 0  # of them; also those that only the tree of prompts holds
    set_back: int = 0  # rows that gave their pages to older ones, and were read again

    filled: float = 0.0  # the share of the slots' room that tokens fill, without pages

    @property
    def cache_share(self) -> float:
        """The share of the caches that rows hold: of pages, or of the room of all slots."""
        return 1 - self.free_pages / self.pages if self.pages else self.filled


class Scheduler:
    """Serves requests in the order in which they came, in a thread of its own."""

    def __init__(self, device: Device, waiting: int) -> None:
        """Starts the thread.

        Args:
          device: with its batch made (`Device.start`).
          waiting: the most requests that wait.
        """
        self._device, self._most_waiting = device, waiting
        self._slots = [_Slot() for _ in range(device.slots)]
        self._queue: collections.deque[Admission] = collections.deque()
        self._admissions: list[Admission] = []  # whose prompts are read, in their order
        self._changed = threading.Condition()
        self._closing = self._cut = self._paused = False
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._error: Exception | None = None
        self._finished = self._cancelled = self._prompt_tokens = self._copied_tokens = 0
        self._steps, self._host_share, self._mean_seconds = 1, 0.0, 1.0
        self._turn_seconds = 0.0  # of a turn without reading
        self._step_seconds = 0.0  # of a step
        self._taken = float(MOST_STEPS)  # steps of a turn without reading
        self._asked: collections.deque[_Asked] = collections.deque()
        self._undelivered: list[_Undelivered] = []
        self._arrived: float | None = None  # when the turn before was done; None: there was none
        self._waited = 0.0  # seconds for the device since then
        self._paging = None if device.pages is None else Paging(device)
        self._numbers, self._set_back_rows = itertools.count(), 0
        self._thread = threading.Thread(target=self._serve, name="specjax engine", daemon=True)
        self._thread.start()

    def put(self, admission: Admission) -> None:
        """Queues a request.

        Raises:
          Busy: too many requests are waiting.
          Closed: the scheduler was closed.
        """
        with self._changed:
            self.check_open()
            if len(self._queue) >= self._most_waiting and not self._is_idle():
                raise Busy(len(self._queue), self._seconds_until_a_place())
            admission.number = next(self._numbers)
            self._queue.append(admission)
            self._changed.notify_all()

    def load(self) -> Load:
        with self._changed:
            running = self._running()
            room = len(self._slots) * self._device.decoder.capacity
            filled = sum(slot.length for slot in running) / room
            return Load(
                len(running), len(self._queue) + len(self._admissions), self._finished,
                self._cancelled, self._prompt_tokens, self._copied_tokens, self._host_share,
                self._steps, *self._page_counts(), filled,
            )  # fmt: skip

    def _page_counts(self) -> tuple[int, int, int]:
        if self._paging is None:
            return 0, 0, 0
        store = self._paging.store
        return store.count, store.available, self._set_back_rows

    @property
    def healthy(self) -> bool:
        """True if the thread still serves the requests that it has accepted."""
        return self._thread.is_alive() and self._error is None

    def close(self, finish: bool, timeout: float | None) -> None:
        """Stops the thread, as `Engine.close`."""
        with self._changed:
            self._closing = True
            self._cut |= not finish
            self._changed.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive():
            with self._changed:
                self._cut = True
                self._changed.notify_all()
            self._thread.join()

    def call(self, function: Callable[[], _T]) -> _T:
        """Runs a function in the thread of the engine, between two turns, and returns its result.

        Raises:
          Closed: the engine stopped before.
          Exception: what the function raises.
        """
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def run() -> None:
            if self._error is not None or self._closing:
                future.set_exception(Closed("the engine has stopped"))
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        with self._changed:
            self.check_open()
            self._calls.append(run)
            self._changed.notify_all()
        return future.result()

    def pause(self, mode: str) -> int:
        """Stops the turns, as `Engine.pause`; for `call`.  Returns how many requests there were."""
        count = len(self._queue) + len(self._admissions) + len(self._running())
        if mode == "abort":
            with self._changed:
                handles = [admission.handle for admission in self._queue]
            handles += [admission.handle for admission in self._admissions]
            handles += [slot.handle for slot in self._slots if slot.handle is not None]
            for handle in handles:
                handle.cancel()
            self._drop_cancelled()
        elif mode == "retract":
            self._set_all_back()
        with self._changed:
            self._paused = True
        return count

    def go_on(self) -> None:
        """Ends a pause; for `call`."""
        with self._changed:
            self._paused = False

    def flush(self) -> None:
        """Forgets the prompts that later ones could copy from; for `call`.

        Raises:
          ValueError: requests have a slot.
        """
        running = len(self._running()) + len(self._admissions)
        if running:
            raise ValueError(
                f"{running} requests are running: wait for their end, or pause with the mode abort "
                "or retract before"
            )
        for slot in self._slots:
            slot.prompt = np.zeros(0, np.int32)
        if self._paging is not None:
            self._paging.store.clear()

    def renew(self, replace: Callable[[], None]) -> None:
        """Calls `replace`, which changes the weights; for `call`.

        Requests that were set back keep the tokens that the old weights wrote.

        Raises:
          ValueError: as `flush`.
        """
        self.flush()
        replace()
        with self._changed:
            waiting = list(self._queue)
        for admission in waiting:
            known, row = admission.handle.tokens, admission.row
            prompt = row.tokens[: len(row.tokens) - row.delivered]
            if known:
                tokens = np.concatenate([prompt, np.array(known, np.int32)])
                expected = row.expected[len(known) - row.delivered :]
                admission.row = dataclasses.replace(
                    row, tokens=tokens, delivered=len(known), expected=expected
                )

    def _running(self) -> list[_Slot]:
        return [slot for slot in self._slots if slot.handle is not None]

    def _set_all_back(self) -> None:
        """Puts all requests that have a slot, or whose prompt is read, back into the queue."""
        back = self._stopped_reading(len(self._admissions))
        ended = np.array([slot.handle is not None for slot in self._slots])
        for slot in self._running():
            assert slot.admission is not None
            slot.admission.counts = slot.counts
            back.append(slot.admission)
            self._vacate(slot)
        if ended.any():
            self._device.end(ended)
        self._put_back(back)

    def _stopped_reading(self, count: int) -> list[Admission]:
        """Takes the pages of the youngest `count` prompts that are read; returns their requests."""
        by_age = sorted(self._admissions, key=lambda one: one.number)
        stopped = by_age[len(by_age) - count :]
        self._admissions = [one for one in self._admissions if one not in stopped]
        for admission in stopped:
            if self._paging is not None:
                self._paging.store.release(admission.pages)
            admission.reading, admission.pages = None, []
        return stopped

    def _put_back(self, admissions: Sequence[Admission]) -> None:
        """Puts requests back at the front of the queue, the oldest first."""
        with self._changed:
            for admission in sorted(admissions, key=lambda one: one.number, reverse=True):
                self._queue.appendleft(admission)

    def check_open(self) -> None:
        """Raises Closed unless the scheduler takes requests."""
        if self._error is not None:
            raise Closed(f"the engine has stopped: {self._error}")
        if self._closing:
            raise Closed("the engine is stopping and takes no more requests")

    def _is_idle(self) -> bool:
        """True if the next request will begin at once."""
        is_free = any(slot.handle is None for slot in self._slots)
        return is_free and not self._admissions and not self._queue

    def _seconds_until_a_place(self) -> float:
        return max(1.0, self._mean_seconds * len(self._queue) / len(self._slots))

    # What follows runs in the engine's own thread.

    def _serve(self) -> None:
        try:
            while self._wait_for_work():
                if self._calls or self._paused:
                    self._settle_all()
                while self._calls:
                    self._calls.popleft()()
                if self._paused:
                    self._drop_cancelled()
                else:
                    self._turn()
        except Exception as error:  # whatever it is, nobody may wait for ever
            self._error = error
        with contextlib.suppress(Exception):  # of the device
            self._settle_all()
        error = Closed("the engine was closed before this text was finished")
        if self._error is not None:
            error = Closed(f"the engine has stopped: {self._error!r}")
            error.__cause__ = self._error
        for call in self._calls:
            call()
        with self._changed:
            self._closing = True
            waiting = [admission.handle for admission in self._queue]
            self._queue.clear()
        waiting += [admission.handle for admission in self._admissions]
        waiting += [one.handle for one in self._undelivered if one.new.done]
        for handle in (*waiting, *(slot.handle for slot in self._slots if slot.handle)):
            handle.fail(error)

    def _wait_for_work(self) -> bool:
        """Waits until there is something to do.  Returns False to stop."""
        with self._changed:
            if self._closing:
                self._paused = False  # what was accepted is served
            # While paused it looks now and then whether a request was cancelled.
            self._changed.wait_for(
                lambda: self._closing or self._calls or (not self._paused and self._has_work()),
                _LOOK if self._paused and self._has_work() else None,
            )
            if self._closing:
                self._paused = False
            return not self._cut and (self._paused or bool(self._calls) or self._has_work())

    def _has_work(self) -> bool:
        running = any(slot.handle is not None for slot in self._slots)
        waiting = bool(self._queue) or bool(self._admissions)
        return waiting or running or bool(self._asked)

    def _turn(self) -> None:
        """Drops cancelled requests, reads chunks of prompts, and asks for a few steps.

        Then it takes the news of the turn before, while the device works.
        """
        if not self._asked:
            self._arrived, self._waited = time.perf_counter(), 0.0
        self._drop_cancelled()
        reads = self._read_some()
        # While a prompt is read, its text waits for every step.
        left = self._steps_left()
        steps = 1 if reads else self._steps_now(left)
        if self._paging is not None:
            steps, left = self._make_room(steps), self._steps_left()
        if left:
            self._ask(self._up_to_an_end(steps, left.values()), left, reads)
        else:
            self._device.tell()
        if self._asked and (len(self._asked) > 1 or not left):
            self._take_news()

    def _steps_now(self, left: Mapping[int, int]) -> int:
        """Returns the steps of a turn of the slots `left`: half as many while another one is free.

        A request may come for it.  While a request waits, a turn takes at most `_OF_A_TEXT` of the
        time of a text.  On an accelerator all turns are whole: they are short, and half of one may
        be less than the host needs.
        """
        if self._device.pads:
            return self._steps
        comes = any(number not in left for number in range(len(self._slots)))
        steps = -(-self._steps // 2) if comes else self._steps
        if self._ends_apart(left):
            steps = min(steps, math.ceil(_LONGER * self._taken))
        # The prompts of `_admissions` are read already, and their requests wait for a slot.
        if (self._queue or self._admissions) and self._step_seconds:
            most = int(_OF_A_TEXT * self._mean_seconds / self._step_seconds)
            steps = min(steps, max(1, most))
        return steps

    def _ends_apart(self, left: Mapping[int, int]) -> bool:
        """Returns whether rows end at steps of their own, so that a turn ends with each of them.

        Rows without drafts that have about as many steps left end in the same turn, and the rows
        that follow them begin together, so to end that turn early gains nothing.  On an accelerator
        turns may be too short for the host.

        Args:
          left: the steps that the row in each slot can still take.
        """
        if self._device.pads or not left:
            return False
        rows = [slot.admission.row for n in left if (slot := self._slots[n]).admission]
        if any(self._device.parts_of(row) for row in rows):
            return True
        return max(left.values()) - min(left.values()) > self._steps

    def _steps_left(self) -> dict[int, int]:
        """Returns the steps that each row can still take; each writes a token, or more."""
        found = {}
        for number, slot in enumerate(self._slots):
            if slot.handle is not None and slot.admission is not None:
                left = slot.admission.row.limit - slot.length - self._steps_of(slot, True)
                if left > 0:
                    found[number] = left
        return found

    def _up_to_an_end(self, steps: int, left: Iterable[int]) -> int:
        """Returns fewer steps where a row ends in the second half of so many and another waits."""
        if not self._queue and not self._admissions:
            return steps
        return min([steps, *(one for one in left if 2 * one >= steps)])

    def _steps_of(self, slot: _Slot, expected: bool = False) -> int:
        """Returns the steps of a row that the device was asked for, without news so far.

        Args:
          slot: its slot.
          expected: without those of a turn that probably ends early.
        """
        asked = [one for one in self._asked if any(x is slot for x in one.slots)]
        return sum(one.expected if expected else one.steps for one in asked)

    def _ask(self, steps: int, left: Mapping[int, int], reads: bool) -> None:
        """Asks the device for steps of the rows that have some `left`, and for their tokens."""
        live = np.array([number in left for number in range(len(self._slots))])
        length = np.array([slot.length for slot in self._slots], np.int32)
        written = np.array([slot.written for slot in self._slots], np.int32)
        least = steps
        if self._ends_apart(left) and self._step_seconds:
            least = min(steps, max(1, round(_ANSWER / self._step_seconds)))
        # The host counts steps that a turn has not taken if it ended early, so rows with no steps
        # left by its count may still have some.
        present = np.array([slot.handle is not None for slot in self._slots])
        self._device.run(steps, live, least, present)
        # Before the tokens: several processes compare the tokens that they were asked for last
        # before they are told more, and would wait for the end of this turn.
        logprobs = {
            number: self._device.recorded(number, slot.length)
            for number, slot in enumerate(self._slots)
            if number in left and slot.handle is not None and slot.handle.wants is not None
        }
        news = self._device.peek(length, written)
        slots = [slot if n in left else None for n, slot in enumerate(self._slots)]
        self._asked.append(_Asked(news, slots, length.tolist(), steps, least, reads, logprobs))

    def _take_news(self) -> None:
        """Waits for the oldest turn that the device was asked for, and delivers its tokens."""
        asked, began = self._asked.popleft(), time.perf_counter()
        news = asked.news()
        arrived = time.perf_counter()
        self._waited += arrived - began
        assert self._arrived is not None
        turn = arrived - self._arrived
        took = [
            new.counts[0] - slot.counts[0]
            for number, (slot, new) in enumerate(zip(asked.slots, news, strict=True))
            if slot is not None and slot is self._slots[number]
        ]
        if not asked.reads and turn > 0 and any(took):
            self._adapt(turn - self._waited, turn, max(took))
            self._taken += 0.1 * (max(took) - self._taken)
            self._turn_seconds += 0.1 * (turn - self._turn_seconds)
        self._arrived, self._waited = arrived, 0.0
        for number, (slot, new) in enumerate(zip(asked.slots, news, strict=True)):
            if slot is not None and slot is self._slots[number] and slot.handle is not None:
                recorded = asked.logprobs.get(number, lambda: None)
                self._settle(number, slot, new, asked.length[number], recorded)
        self._deliver_all()

    def _settle_all(self) -> None:
        """Takes and delivers all news."""
        self._deliver_all()
        while self._asked:
            self._take_news()

    def _make_room(self, steps: int) -> int:
        """Gives the rows pages for the coming steps, and returns how many steps there will be.

        If pages run out, there are fewer steps.  If there are too few for one, the youngest request
        gives its pages back, waits, and is read again.
        """
        assert self._paging is not None
        while True:
            running = [
                Running(number, slot.length, self._steps_of(slot), slot.admission.row)
                for number, slot in enumerate(self._slots)
                if slot.handle is not None and slot.admission is not None
            ]
            if self._paging.cover(running, steps):
                break
            if steps > 1:
                steps //= 2
            else:
                self._set_back()
        self._paging.place()
        return steps

    def _set_back(self) -> None:
        """Puts the youngest request that has pages back at the front of the queue.

        What was delivered of its text stays.  The text is decoded again from its beginning, so it
        is the same, and what is known already is not delivered twice.
        """
        assert self._paging is not None
        if self._asked:  # with their news some rows may be done, and others need less
            self._settle_all()
            return
        if self._admissions:  # their texts have not begun, or wait anyway
            self._put_back(self._stopped_reading(1))
            return
        _, number, admission = max(
            (slot.admission.number, number, slot.admission)
            for number, slot in enumerate(self._slots)
            if slot.handle is not None and slot.admission is not None
        )
        admission.counts = self._slots[number].counts
        self._vacate(self._slots[number])
        self._put_back([admission])
        with self._changed:
            self._set_back_rows += 1
        self._device.end(np.arange(len(self._slots)) == number)

    def _adapt(self, host: float, turn: float, steps: int) -> None:
        """Chooses the number of steps of the next turns by the seconds of one.

        Args:
          host: the seconds in which the host did not wait for the device.
          turn: the seconds between the news of the turn before and its own.
          steps: of this turn.
        """
        self._host_share += 0.1 * (host / turn - self._host_share)
        most = _HOST_SHARE[not self._device.pads]
        step = max(turn, self._device.turn_seconds) / steps
        self._step_seconds += 0.1 * (step - self._step_seconds)
        wanted = min(MOST_STEPS, max(1, round(min(host / most, _LONGEST) / step)))
        # A slow turn of the host is often chance: one step more or less at a time.
        self._steps += int(np.sign(wanted - self._steps))

    def _drop_cancelled(self) -> None:
        # A client may cancel at any time, so each handle is asked once.
        running = [number for number, slot in enumerate(self._slots) if _is_cancelled(slot)]
        ended = np.zeros(len(self._slots), bool)
        if running:
            self._settle_all()
        for number in running:
            slot = self._slots[number]
            handle, prepared, counts = slot.handle, slot.prepared, slot.counts
            if handle is None or prepared is None:  # its text has ended
                continue
            kept = handle.tokens
            text = prepared.texts.decode(0, kept)
            self._vacate(slot)
            self._finish(handle, End(len(kept), text, "cancelled", counts))
            ended[number] = True
        if ended.any():
            self._device.end(ended)
        with self._changed:
            dropped = [a for a in self._queue if a.handle.cancelled]
            for admission in dropped:
                self._queue.remove(admission)
        reading = [admission for admission in self._admissions if admission.handle.cancelled]
        self._admissions = [one for one in self._admissions if one not in reading]
        dropped += reading
        for admission in dropped:
            if self._paging is not None:
                self._paging.store.release(admission.pages)
            self._cancelled += 1
            kept = admission.handle.tokens  # of a row that was set back
            text = admission.prepared.texts.decode(0, kept) if kept else ""
            end = End(len(kept), text, "cancelled", admission.counts)
            admission.handle.extend([], [], 0, None, end)

    def _read_some(self) -> bool:
        """Reads chunks of prompts.  Returns False if there was nothing to read."""
        most = max(_TOGETHER, len(self._slots) // 2)
        if self._running():
            # How long the steps of this turn may take, in turns without reading.
            longest = _LONGER if self._ends_apart(self._steps_left()) else 1.0
            reading = (_READING - longest) * self._turn_seconds
            most = int(reading / self._device.chunk_seconds)
        left = self._device.chunk * max(1, min(most, len(self._slots)))
        moved = False
        while left > 0:
            self._take()
            read = self._read(left)
            left -= read
            if self._place_read() or read:
                moved = True
            elif not self._a_request_comes():
                break
        return moved

    def _a_request_comes(self) -> bool:
        """Waits for a request while a slot is free and the device has begun a turn just now."""
        free = sum(slot.handle is None for slot in self._slots) - len(self._admissions)
        if not self._asked or self._arrived is None or free <= 0:
            return False
        began = time.perf_counter()
        # A process that was stopped for minutes has measured a long turn.
        turn = min(self._asked[0].expected * self._step_seconds, _LONGEST)
        left = self._arrived + _ASKED_BEFORE * turn - began
        with self._changed:
            if self._queue or left <= 0:  # a request that waits for pages
                return False
            self._changed.wait_for(lambda: self._queue or self._closing or self._calls, left)
            came = bool(self._queue)
        self._waited += time.perf_counter() - began
        return came

    def _take(self) -> None:
        """Begins to read as many prompts as there are slots for, or one ahead if none is free.

        Without pages only one, since each would hold the memory of a slot.
        """
        free = sum(slot.handle is None for slot in self._slots)
        most = 1 if self._paging is None else max(1, min(free, ROWS))
        while len(self._admissions) < most:
            with self._changed:
                if not self._queue:
                    return
                self._admissions.append(self._queue.popleft())
            if not self._begin(self._admissions[-1]):
                self._put_back([self._admissions.pop()])
                return

    def _read(self, left: int) -> int:
        """Reads a chunk of a prompt, or chunks of several.

        The prompts take turns, so that a short one does not wait for a long one.

        Args:
          left: the tokens that this turn may still read.

        Returns:
          The tokens of the pass; 0 if all prompts are read.
        """
        device = self._device
        waiting = sorted((one for one in self._admissions if one.left), key=lambda one: one.passes)
        if not waiting:
            return 0
        width, uses = waiting[0].left[0][2], waiting[0].row.uses
        alike = [one for one in waiting if (one.left[0][2], one.row.uses) == (width, uses)]
        most = device.together(width)
        group = alike[: max(1, min(most, left // width))]
        if len(group) < most - 1 and not device.pads:  # one blank row costs less than two passes
            group = group[:1]
        readings, chunks = [], []
        for one in group:
            assert one.reading is not None
            readings.append(one.reading)
            chunks.append(one.left[0][:2])
        if len(group) == 1:
            ((at, tokens),) = chunks
            readings = [device.read(readings[0], tokens, at, width, uses)]
        else:
            readings = device.read_together(readings, chunks, width, uses)
        for one, reading, (at, tokens) in zip(group, readings, chunks, strict=True):
            one.reading, one.passes = reading, one.passes + 1
            del one.left[0]
            if at + len(tokens) in one.marks:
                one.snapshots[at + len(tokens)] = device.snapshot(reading)
        return width * len(group)

    def _place_read(self) -> bool:
        """Puts the prompts that are read into free slots.  Returns False if there was none."""
        free = [number for number, slot in enumerate(self._slots) if slot.handle is None]
        placed = [one for one in self._admissions if not one.left][: len(free)]
        for admission in placed:
            number = self._least_useful(free)
            free.remove(number)
            self._place(number, admission)
            self._admissions.remove(admission)
        return bool(placed)

    def _place(self, number: int, admission: Admission) -> None:
        """Puts a prompt that is read into a slot."""
        row, device = admission.row, self._device
        assert admission.reading is not None
        device.insert(number, admission.reading, row)
        if self._paging is not None:
            pages, admission.pages = admission.pages, []
            snapshots, admission.snapshots = admission.snapshots, {}
            self._paging.insert(number, row, admission.salt, pages, admission.reading, snapshots)
        admission.reading = None
        self._slots[number] = _Slot(
            admission.handle,
            admission.prepared,
            admission,
            len(row.tokens),
            trusted=row.delivered,
            prompt=row.tokens,
            uses=row.uses,
            salt=admission.salt,
        )

    def _begin(self, admission: Admission) -> bool:
        """Begins to read a prompt; returns False if there are too few pages for it."""
        row, device, handle = admission.row, self._device, admission.handle
        if self._paging is None:
            slot, count = self._known_prefix(row, admission.salt)
            admission.reading = device.copy(slot, count) if count else device.empty()
        else:
            running = len(self._running()) + len(self._admissions) - 1
            known = len(row.tokens) - row.delivered + len(handle.tokens)
            begun = self._paging.begin(row, admission.salt, known, running)
            if begun is None:
                return False
            admission.reading, count, admission.pages = begun.reading, begun.count, begun.pages
            admission.marks, admission.snapshots = begun.marks, {}
        admission.left = prompt_passes(count, row.tokens, device.widths)
        admission.passes = 0
        if not handle.begun:
            handle.begin()
            handle.copied = count
            self._prompt_tokens += len(row.tokens)
            self._copied_tokens += count
        return True

    def _known_prefix(self, row: Row, salt: str | None) -> tuple[int, int]:
        """Returns a slot that has a prefix of this prompt, and the number of tokens to copy.

        Prompts of different salts share nothing.

        Only whole chunks are copied: they were read with the same bits as this prompt would be.  At
        least one token is not copied, since a drafter may need the hidden state of the last one.
        """
        best = 0, 0
        if not self._device.copies:
            return best
        chunk = self._device.chunk
        for number, slot in enumerate(self._slots):
            if not row.uses <= slot.uses or salt != slot.salt:
                continue
            most = min(len(slot.prompt) - 1, len(row.tokens) - 2)
            if most < chunk:
                continue
            same = slot.prompt[:most] == row.tokens[:most]
            shared = most if same.all() else int(same.argmin())
            whole_chunks = shared // chunk * chunk
            if whole_chunks > best[1]:
                best = number, whole_chunks
        return best

    def _least_useful(self, free: list[int]) -> int:
        """Returns the free slot with the shortest prompt: the longer ones may be copied again."""
        return min(free, key=lambda number: len(self._slots[number].prompt))

    def _settle(
        self,
        number: int,
        slot: _Slot,
        new: News,
        known: int,
        logprobs: Callable[[], Logprobs | None],
    ) -> None:
        """Takes what the device says of a row, and frees its slot if it is done.

        Args:
          known: the tokens of the row when the device was asked.
          logprobs: returns those of the tokens from there on.
        """
        handle, prepared, recorded = slot.handle, slot.prepared, None
        assert handle is not None and prepared is not None
        again = slot.length - known  # tokens of the turn before, which had no news then
        if again:
            new = dataclasses.replace(new, tokens=new.tokens[again:], origin=new.origin[again:])
        if handle.wants is not None and new.tokens:
            recorded = _part(logprobs(), again, new.length - known, handle.wants)
        before = slot.length, slot.written
        self._undelivered.append(
            _Undelivered(number, slot, handle, prepared, new, *before, recorded)
        )
        slot.length, slot.written = new.length, slot.written + len(new.tokens)
        slot.counts = new.counts
        if new.done:
            self._vacate(slot)

    def _deliver_all(self) -> None:
        """Delivers what the device has said; a failure, as of a tokenizer, ends only its text."""
        while self._undelivered:
            one = self._undelivered.pop(0)
            try:
                self._deliver(one)
            except Exception as error:
                one.handle.fail(error)
                self._stop(one)

    def _deliver(self, one: _Undelivered) -> None:
        """Delivers the new tokens of a row, and ends its text if it has come to its end."""
        handle, prepared, new = one.handle, one.prepared, one.new
        before, logprobs = len(handle.tokens), None
        # What was delivered before the row was set back is written again.
        again = min(before - one.written - one.slot.trusted, len(new.tokens))
        fresh, origin = new.tokens[again:], new.origin[again:]
        if handle.wants is not None and fresh:
            logprobs = _part(one.recorded, again, len(new.tokens), handle.wants)
        news = fresh, origin, new.counts[2], logprobs
        if not new.done and not prepared.texts.stops and before >= handle.delivered.count:
            handle.extend(*news)
            return
        tokens = [*handle.tokens, *fresh]
        # Nobody may see the tokens before it is known whether they hold a stop string.
        text, stopped = "", False
        if new.done or prepared.texts.stops:
            tokens, text, stopped = prepared.texts.cut(0, tokens, before)
        handle.delivered.check(tokens, before, stopped or new.done)
        if not (stopped or new.done):
            handle.extend(*news)
            return
        self._stop(one)
        is_eos = bool(tokens) and tokens[-1] in set(prepared.eos[0].tolist())
        finish = "stop" if stopped else "eos" if is_eos else "limit"
        self._finish(handle, End(len(tokens), text, finish, new.counts), news)

    def _stop(self, one: _Undelivered) -> None:
        """Stops a row and frees its slot, unless the device was done with it."""
        if not one.new.done:
            self._device.end(np.arange(len(self._slots)) == one.number)
            self._vacate(one.slot)

    def _vacate(self, slot: _Slot) -> None:
        """Frees a slot and its pages; the row that was in it is done or will be stopped."""
        if self._paging is not None:
            self._paging.leave(self._slots.index(slot))
        with self._changed:
            slot.handle = slot.prepared = slot.admission = None

    def _finish(self, handle: Handle, end: End, news: _New = ([], [], 0, None)) -> None:
        """Delivers the last tokens of a text together with its end."""
        with self._changed:
            self._cancelled += end.finish == "cancelled"
            self._finished += end.finish != "cancelled"
        handle.extend(*news, end)
        self._mean_seconds += 0.1 * (handle.seconds - self._mean_seconds)


def _is_cancelled(slot: _Slot) -> bool:
    return slot.handle is not None and slot.handle.cancelled


def _part(row: Logprobs | None, start: int, stop: int, num_top: int) -> Logprobs | None:
    """Returns the log-probabilities of the tokens `start` to `stop`, and of `num_top` others."""
    if row is None:
        return None
    raw, warped, top_ids, top = (x[start:stop] for x in (row.raw, row.warped, row.top_ids, row.top))
    return Logprobs(raw, warped, top_ids[:, :num_top], top[:, :num_top])
