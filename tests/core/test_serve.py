"""The engine: one text whatever the load, bounds, ends, cancelling, and what it refuses."""

from __future__ import annotations

import asyncio
import collections
import functools
import threading
import time
import types
from typing import Any

import counted
import load
import numpy as np
import pytest
from toys import TABLES as toys

import specjax
from specjax import Request
from specjax.models import LanguageModel
from specjax.serve import Busy, Closed, Engine, scheduler
from specjax.serve.reading import passes, prompt_passes, widths
from specjax.serve.resuming import Delivered


@functools.cache
def engine() -> Engine:
    """An engine that all tests share; it compiles once."""
    return load.engine(slots=3)


def ask(**fields: Any) -> Request:
    return Request(**{"prompts": "def main(", "max_new_tokens": 12, "proposer": "none", **fields})


def test_no_text_depends_on_load():
    """Requests of all kinds at once and in any order, with cancelled neighbours, against each one
    alone: the same tokens, texts, ends, and bits of log-probabilities; nothing is compiled."""
    made, seeds = engine(), list(range(28))
    before = made.compiled()
    compiled = counted.compilations()
    served = load.under_load(made, seeds, np.random.default_rng(0), 0.2, threads=20)
    assert sorted(served) == seeds
    wrong, counts = load.differences(made, seeds, served, generated=0.0)
    assert wrong == [] and counts["alone"] == 21
    assert counted.compilations() == compiled
    assert made.compiled() == before
    state = made.load()
    assert (state.running, state.waiting) == (0, 0)
    assert state.copied_tokens > 0 and state.cancelled > 0


def test_the_text_is_that_of_generate():
    """In float32, for requests of every drafter."""
    made, seeds = engine(), list(range(100, 112))
    served = {seed: made.submit(load.request(seed)).result(60) for seed in seeds}
    assert {load.request(seed).proposer for seed in seeds} >= {"lookup", "draft", "medusa"}
    assert load.differences(made, seeds, served, generated=0.25)[0] == []


def test_the_law_finds_a_wrong_copy(monkeypatch):
    """A prefix that is copied from another prompt changes texts, and the comparison says so."""
    made, seeds = engine(), list(range(200, 208))
    alone = {seed: made.submit(load.request(seed)).result(60) for seed in seeds}
    wrong = lambda row, salt: (0, load.CHUNK) if len(row.tokens) > load.CHUNK + 1 else (0, 0)  # noqa: E731
    monkeypatch.setattr(made._scheduler, "_known_prefix", wrong)
    assert load.differences(made, seeds, alone, generated=0.0)[0] != []


def test_who_guessed_each_token():
    """Depths rise by one from 1 within a step, and the counts are those of the decoder."""
    for seed in range(300, 312):
        served = engine().submit(load.request(seed)).result(60)
        depths = [guess.depth for guess in served.guesses]
        assert len(depths) == len(served.tokens)
        for before, after in zip([0, *depths], depths, strict=False):
            assert after in (0, before + 1)
        if served.finish != "stop":  # the decoder also counts what comes after a stop string
            assert sum(depth > 0 for depth in depths) == served.stats.accepted
            assert len(served.steps) == served.stats.target_passes
            assert sum(step.written for step in served.steps) == served.stats.emitted
            assert sum(step.offered for step in served.steps) == served.stats.proposed
        names = {guess.drafter for guess in served.guesses if guess.depth}
        assert names <= set(load.request(seed).proposer.split("+"))
        assert all((guess.drafter is None) == (guess.depth == 0) for guess in served.guesses)


def test_increments_are_the_text():
    """From a thread and from an event loop, by several readers of one handle."""
    handle = engine().submit(ask(max_new_tokens=40, stop=["zzz"], logprobs=1))
    pieces: list[Any] = []
    reader = threading.Thread(target=lambda: pieces.extend(handle))
    reader.start()

    async def read() -> list[Any]:
        return [increment async for increment in handle]

    others = asyncio.run(read())
    reader.join()
    served = handle.result(60)
    for made in (pieces, others):
        assert "".join(piece.text for piece in made) == served.text
        assert [token for piece in made for token in piece.tokens] == served.tokens
        assert [guess for piece in made for guess in piece.guesses] == served.guesses
        # Pieces are made now, and until then an increment holds none of the tokens before it.
        assert all(isinstance(x, int) for piece in made for x in piece._pieces.args)
        assert [part for piece in made for part in piece.pieces] == served.pieces
        parts = [np.asarray(piece.logprobs.raw) for piece in made if piece.tokens]
        assert np.array_equal(np.concatenate(parts), served.logprobs.raw)
    assert served.logprobs.top_ids.shape == (40, 1)
    assert served.times.submitted < served.times.begun < served.times.first < served.times.ended


def test_a_row_takes_steps_of_its_own_width(monkeypatch):
    """A row without drafts reads one token a step, also beside rows that read more."""
    made = engine()
    device, ran = made._device, []
    run = device._run

    def watched(width: int, *others: Any) -> None:
        before = np.asarray(device.state.length)
        run(width, *others)
        moved = np.asarray(device.state.length) > before
        ran.append((width, set(device._width[moved].tolist())))

    monkeypatch.setattr(device, "_run", watched)
    made.submit(ask()).result(60)
    assert {width for width, _ in ran} == {1}
    ran.clear()
    asked = [ask(proposer=name, max_new_tokens=24) for name in ("none", "lookup", "draft")]
    for handle in [made.submit(request) for request in asked]:
        handle.result(60)
    assert len({width for width, _ in ran}) > 1
    assert all(moved <= {width} for width, moved in ran)


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_turn_is_launched_before_the_last_one_is_read(monkeypatch, logprobs):
    """Else the device would wait for the host after each turn; also for log-probabilities.  These
    are asked for before the tokens, which several processes compare before they are asked more."""
    made = engine()
    device, ran, reads = made._device, [], []  # of each reading: the turn, and those launched then
    asks = []
    run = device.run

    def counted_run(*arguments):
        ran.append(None)
        run(*arguments)

    def counted_reading(ask):
        def asked(*arguments):
            asks.append(ask.__name__)
            news, turn = ask(*arguments), len(ran)

            def wait():
                reads.append((turn, len(ran)))
                return news()

            return wait

        return asked

    monkeypatch.setattr(device, "run", counted_run)
    monkeypatch.setattr(device, "peek", counted_reading(device.peek))
    monkeypatch.setattr(device, "recorded", counted_reading(device.recorded))
    served = made.submit(ask(max_new_tokens=80, logprobs=logprobs)).result(60)
    assert len(served.tokens) == 80 and len(ran) > 3
    each = 1 if logprobs is None else 2
    assert asks == ["recorded", "peek"][2 - each :] * len(ran)
    assert [turn for turn, _ in reads] == [n for n in range(1, len(ran) + 1) for _ in range(each)]
    assert all(launched == turn + 1 for turn, launched in reads[:-each])


@pytest.mark.parametrize(("accelerator", "steps"), [(False, 4), (True, 7)])
def test_a_turn_is_shorter_while_a_slot_is_free(monkeypatch, accelerator, steps):
    """But not where its steps may take less than the host, for which the device would wait."""
    made = engine()
    monkeypatch.setattr(made._device, "pads", accelerator)
    monkeypatch.setattr(made._scheduler, "_steps", 7)
    assert made._scheduler._steps_now({}) == steps


@pytest.mark.parametrize("where", ["_queue", "_admissions"])
@pytest.mark.parametrize(("waits", "seconds", "steps"), [
    (0, 0.8, 40), (1, 8.0, 40), (1, 0.8, 10), (1, 0.001, 1),
])  # fmt: skip
def test_a_turn_is_short_beside_a_text_while_a_request_waits(
    monkeypatch, where, waits, seconds, steps
):
    """A row may end early, and its slot is idle until the next turn.  The request that waits may be
    read already."""
    made = engine()._scheduler
    monkeypatch.setattr(made._device, "pads", False)
    for name, value in {
        "_steps": 40, "_step_seconds": 0.01, "_mean_seconds": seconds, where: [None] * waits,
    }.items():  # fmt: skip
        monkeypatch.setattr(made, name, value)
    found = made._steps_now(dict.fromkeys(range(len(made._slots)), 50))
    monkeypatch.undo()
    assert found == steps


@pytest.mark.parametrize(("accelerator", "name", "apart"), [
    (False, "draft", True), (False, "none", False), (True, "draft", False),
])  # fmt: skip
def test_a_turn_ends_with_a_text_of_drafts(monkeypatch, accelerator, name, apart):
    """One row without drafts ends as is expected; on an accelerator a turn may be too short."""
    made = engine()
    scheduler, device = made._scheduler, made._device
    monkeypatch.setattr(device, "pads", accelerator)
    monkeypatch.setattr(scheduler, "_step_seconds", 1e-3)
    monkeypatch.setattr(scheduler, "_steps", 40)
    monkeypatch.setattr(scheduler, "_taken", 40.0)  # turns of the tests before may be short
    run, asked = device.run, []

    def watched(steps: int, live: np.ndarray, least: int, present: np.ndarray) -> None:
        asked.append(least < steps)
        run(steps, live, least, present)

    monkeypatch.setattr(device, "run", watched)
    monkeypatch.setattr(scheduler, "_adapt", lambda *_: None)
    made.submit(ask(proposer=name, max_new_tokens=60)).result(60)
    assert any(asked) == apart


@pytest.mark.parametrize(("accelerator", "left", "apart"), [
    (False, {0: 10, 2: 51}, True), (False, {0: 10, 1: 50, 2: 50}, False), (False, {1: 7}, False),
    (False, {}, False), (True, {0: 10, 2: 51}, False),
])  # fmt: skip
def test_rows_without_drafts_end_apart_if_they_end_in_other_turns(
    monkeypatch, accelerator, left, apart
):
    """Those that end in one turn are followed by others together."""
    made = engine()._scheduler
    monkeypatch.setattr(made._device, "pads", accelerator)
    monkeypatch.setattr(made, "_steps", 40)
    assert made._ends_apart(left) is apart


def filled(made: Engine, *requests: Request) -> Any:
    """The device of an idle engine, with these requests in its first slots."""
    made.submit(ask(max_new_tokens=2)).result(60)
    for slot, request in enumerate(requests):
        row, reading = made.checker.admit(request).row, made._device.empty()
        for at, tokens, width in prompt_passes(0, row.tokens, made._device.widths):
            reading = made._device.read(reading, tokens, at, width, row.uses)
        made._device.insert(slot, reading, row)
    return made._device


def test_a_turn_has_fewer_steps_once_a_row_is_done():
    """The watched rows end it, and the others go on where they were."""
    made = load.engine(slots=3)
    with made:
        device = filled(made, ask(max_new_tokens=20), ask(max_new_tokens=3))
        live, begun = np.array([True, True, False]), np.asarray(device.state.length)
        for least, moved in ((5, [5, 3]), (2, [7, 3]), (9, [16, 3])):
            device.run(9, live, least, live)
            assert (np.asarray(device.state.length) - begun)[:2].tolist() == moved
        device.run(9, np.array([True, False, False]), 1, live)
        assert (np.asarray(device.state.length) - begun)[0] == 20
        device.end(np.ones(3, bool))


def test_a_row_that_may_be_done_takes_no_step_of_another_width():
    """Such a step would change the bits of a row that is not done, as after a turn that ended
    early."""
    made = load.engine(slots=3)
    with made:
        device = filled(made, ask(max_new_tokens=20), ask(max_new_tokens=20, proposer="draft"))
        present, begun = np.array([True, True, False]), np.asarray(device.state.length)
        for live, moves in (([False, True, False], [0, 1]), ([True, False, False], [1, 1])):
            device.run(2, np.array(live), 2, present)
            moved = np.asarray(device.state.length) - begun
            assert (moved[:2] > 0).tolist() == [bool(x) for x in moves]
        assert not np.asarray(device.state.done)[:2].any()
        device.end(np.ones(3, bool))


def test_a_turn_that_took_minutes_delays_nobody():
    """As in a process that was stopped: later turns do not wait for a share of such a turn."""
    made = engine()
    made._scheduler.call(lambda: setattr(made._scheduler, "_step_seconds", 1e4))
    began = time.perf_counter()
    made.submit(ask(max_new_tokens=60)).result(60)
    assert time.perf_counter() - began < 30
    made._scheduler.call(lambda: setattr(made._scheduler, "_step_seconds", 0.0))


def test_texts_of_one_seed_differ_by_their_index():
    """As the rows of `generate` do."""
    one = ask(temperature=1.0, seed=4)
    made = [engine().submit(one, index=n).result(60).text for n in range(3)]
    output = specjax.generate(
        engine().target, ["def main("] * 3, max_new_tokens=12, temperature=1.0, seed=4,
        proposer="none",
    )  # fmt: skip
    assert made == output.text and len(set(made)) == 3


def test_a_shared_beginning_is_copied():
    """Only whole chunks, and from a row whose drafters have read it."""
    made, source = engine(), load.text()[3000:]
    head = source[: 2 * load.CHUNK + 5]
    fresh = {"max_new_tokens": 4, "eos": []}
    assert made.submit(ask(prompts=[[*head, 3]], **fresh)).result(60).copied == 0
    assert made.submit(ask(prompts=[[*head, 4]], **fresh)).result(60).copied == 2 * load.CHUNK
    other = made.submit(ask(prompts=[[*head, 5]], proposer="draft", **fresh)).result(60)
    assert other.copied == 0
    assert made.submit(ask(prompts=[head[: load.CHUNK]], **fresh)).result(60).copied == 0


def test_requests_of_different_salts_share_nothing():
    chunks = load.CAPACITY // load.CHUNK - 1  # no other prompt is as long, so it is kept
    made, prompt = engine(), [1 + n % 50 for n in range(chunks * load.CHUNK + 3)]
    texts, copied = [], []
    for salt in ("one", "two", "one", None):
        handle = made.submit(ask(prompts=[prompt], max_new_tokens=2), cache_salt=salt)
        served = handle.result(60)
        texts.append(served.tokens)
        copied.append(served.copied)
    assert copied == [0, 0, chunks * load.CHUNK, 0]
    assert texts == texts[:1] * 4
    with pytest.raises(ValueError, match="cache_salt=3"):
        made.submit(ask(), cache_salt=3)


def test_chunks_follow_from_the_length():
    assert widths(128) == (16, 32, 64, 96, 128) and widths(16) == (8, 16) and widths(5) == (5,)
    assert widths(128, cpu=False) == (128,) and widths(512, cpu=False) == (128, 256, 512)
    assert widths(16, cpu=False) == (16,)
    assert list(passes(0, 0, (8, 16))) == []
    assert list(passes(0, 41, (8, 16))) == [(0, 16, 16), (16, 16, 16), (32, 9, 16)]
    assert list(passes(32, 40, (8, 16))) == [(32, 8, 8)]


def test_cancelling():
    """A slot is free after the running turn, a waiting request leaves the queue, and what was
    written so far is kept."""
    made = engine()
    running = [made.submit(ask(max_new_tokens=180, eos=[])) for _ in range(3)]
    waiting = [made.submit(ask()) for _ in range(2)]
    next(iter(running[0]))
    for handle in (running[0], waiting[0]):
        handle.cancel()
    cut = running[0].result(60)
    assert cut.finish == "cancelled" and 0 < len(cut.tokens) < 180 and cut.text
    assert waiting[0].result(60).finish == "cancelled"
    assert waiting[1].result(60).finish == "limit"
    assert [handle.result(60).finish for handle in running[1:]] == ["limit"] * 2
    running[1].cancel()  # a request that has ended stays as it is
    assert running[1].result().finish == "limit"


class CancelledLate:
    """A handle that its client cancels after the engine has looked once."""

    wants, seconds = None, 0.0

    def __init__(self) -> None:
        self.looks, self.tokens, self.heard = 0, [], []
        self.delivered = Delivered()

    @property
    def cancelled(self) -> bool:
        self.looks += 1
        return self.looks > 1

    def extend(self, tokens: list[int], *news: Any) -> None:
        self.tokens = self.tokens + tokens
        self.heard += [end.finish for end in news[3:]] or tokens


def test_a_text_that_is_cancelled_between_two_looks_ends_once():
    """Its client hears what was written before the end, and no prompt that is read is lost."""
    handles: list[Any] = [CancelledLate() for _ in range(3)]
    running, reading, waiting = handles
    texts = types.SimpleNamespace(stops=(), decode=lambda row, tokens: "")
    row: Any = None
    prepared: Any = types.SimpleNamespace(texts=texts)
    slot = scheduler._Slot(running, prepared)
    made: Any = object.__new__(scheduler.Scheduler)
    made._slots, made._paging, made._changed = [slot], None, threading.Condition()
    made._cancelled = made._finished = made._mean_seconds = 0
    made._device = types.SimpleNamespace(end=lambda ended: None)
    made._admissions, made._queue = (
        collections.deque([scheduler.Admission(row, prepared, one)]) for one in (reading, waiting)
    )
    news = scheduler.News(2, False, [5], [0], scheduler._NO_COUNTS)
    made._undelivered = [scheduler._Undelivered(0, slot, running, prepared, news, 1, 0, None)]
    made._asked = collections.deque()
    for _ in range(2):
        made._drop_cancelled()
    assert [one.heard for one in handles] == [[5, "cancelled"], ["cancelled"], ["cancelled"]]


def test_a_full_queue_is_busy_and_closing_finishes():
    """A refusal comes at once and names seconds. `close` serves what was accepted."""
    target = LanguageModel(toys.model(), toys.weights(), None, (), "toy")
    made = Engine(target, slots=1, capacity=48, chunk=16, waiting=2)
    asked = Request(prompts=[[1, 2]], max_new_tokens=40, proposer="none")
    handles, busy = [], []
    began = time.perf_counter()
    for _ in range(40):
        try:
            handles.append(made.submit(asked))
        except Busy as error:
            busy.append(error)
    assert busy and busy[0].seconds >= 1 and "waiting already" in str(busy[0])
    assert time.perf_counter() - began < 5
    made.close()
    assert [len(handle.result().tokens) for handle in handles] == [40] * len(handles)
    with pytest.raises(Closed, match="takes no more requests"):
        made.submit(asked)
    assert not made.healthy


def test_closing_at_once_ends_what_waits():
    target = LanguageModel(toys.model(), toys.weights(), None, (), "toy")
    made = Engine(target, slots=1, capacity=48, chunk=16)
    handles = [made.submit(Request(prompts=[[1]], max_new_tokens=40)) for _ in range(20)]
    made.close(finish=False)
    with pytest.raises(Closed, match="closed before this text was finished"):
        handles[-1].result(10)


def test_a_text_that_cannot_be_read_fails_alone(monkeypatch):
    """The neighbour goes on, and the slot comes back."""
    made = engine()
    one, two = (made.submit(ask(max_new_tokens=60, stop=["zzz"], eos=[])) for _ in range(2))

    def broken(row: int, tokens: list[int], known: int) -> None:
        raise ValueError("no such token")

    monkeypatch.setattr(one.texts, "cut", broken)
    with pytest.raises(ValueError, match="no such token"):
        one.result(60)
    assert two.result(60).finish == "limit"
    assert made.submit(ask()).result(60).finish == "limit" and made.load().running == 0


def test_a_loop_that_is_gone_stops_nobody():
    """An event loop that is closed while it waits for a text."""
    handle = engine().submit(ask(max_new_tokens=150, eos=[]))

    async def leave() -> None:
        await anext(aiter(handle))

    asyncio.run(leave())
    assert handle.result(60).finish == "limit" and engine().healthy


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"prompts": ["a", "b"]}, "2 prompts; submit each"),
        ({"prompts": []}, "prompts is empty"),
        ({"prompts": ""}, "prompt 0 is empty"),
        ({"prompts": [[9999]]}, "vocabulary"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": 190}, "a slot of this engine holds 192: pass max_new_tokens="),
        ({"prompts": [[1] * 200]}, "holds 192: shorten it"),
        ({"temperature": -1.0}, "temperature=-1"),
        ({"top_p": 0.0}, "top_p=0"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": [1, 2]}, "seed has 2 values"),
        ({"stop": [""]}, "empty string"),
        ({"logprobs": 3}, "records at most 2: make it with logprobs=3"),
        ({"logprobs": -1}, "logprobs=-1"),
        ({"eos": [1, 2, 3, 4, 5]}, "eos has 5 ids"),
        ({"proposer": "eagle"}, "none, lookup, draft, tree, medusa, or two of them"),
        ({"proposer": "lookup+lookup"}, "none of the drafters"),
        ({"proposer": "lookup+draft+tree"}, "none of the drafters"),
        ({"proposer": "draft", "num_drafts": 4}, r"in \[0, 3\], since draft drafts 3 tokens"),
        ({"proposer": "draft", "num_drafts": -1}, "num_drafts=-1"),
        ({"proposer": "none", "num_drafts": 1}, "num_drafts=1"),
        ({"proposer": "medusa"}, "several adapters: pass adapter= with one of one, two"),
        ({"proposer": "medusa", "adapter": "three"}, "no adapter 'three'.*they have one, two"),
        ({"proposer": "draft", "adapter": "one"}, "they have none"),
        ({"rule": "rejection"}, "rule= is not used by an engine"),
        ({"documents": ["x"]}, "documents= is not used by an engine"),
        ({"constraint": specjax.Regex("a")}, "no room for one: make it with constraint_size="),
        ({"constraint": specjax.Grammar('start: "a"')}, "on the host, which an engine"),
        ({"bad_words": [[1, 2, 3, 4, 5]]}, "bad_words has more than"),
    ],
)
def test_refused_requests(fields, message):
    with pytest.raises(ValueError, match=message):
        engine().submit(ask(**fields))
    with pytest.raises(ValueError, match=r"pass a specjax\.Request"):
        engine().submit("a text")
    with pytest.raises(ValueError, match="index=-1"):
        engine().submit(ask(), index=-1)


def test_a_batch_that_does_not_fit_is_refused():
    """Before anything is compiled."""
    target = LanguageModel(toys.model(), toys.weights(), None, (), "toy")
    engine()  # compiles small programs that every engine uses
    compiled = counted.compilations()
    with pytest.raises(ValueError, match=r"16777216 slots .* would take \d{4}.*fewer slots="):
        Engine(target, slots=2**24, capacity=2**23, chunk=16)  # thousands of terabytes
    assert counted.compilations() == compiled
