"""The engine with pages: texts while pages run out, shared beginnings, and what is refused."""

from __future__ import annotations

import functools
import types
from typing import Any

import jax
import numpy as np
import pytest
from toys import TABLES
from toys import TRANSFORMERS as toys

import specjax
from specjax import Request
from specjax.models import LanguageModel
from specjax.serve import Engine, Served
from specjax.serve.batch import ROWS, Device
from specjax.serve.paging import Paging
from specjax.serve.reading import Reading

pytestmark = pytest.mark.xdist_group("serve page room")  # a share takes all of them, or none

PAGE, COUNT = 16, 7


@functools.cache
def target() -> LanguageModel:
    return LanguageModel(toys.model(), toys.weights(), None, (toys.EOS,), "toy")


@functools.cache
def engine() -> Engine:
    """Room for one text of the whole capacity, and for a short one beside it."""
    head = specjax.Drafter(*toys.CASES["eagle3 tree"], "head")
    return Engine(
        target(), {"head": head}, slots=3, capacity=64, chunk=16, cache_tokens=COUNT * PAGE + 1,
        page=PAGE, logprobs=1,
    )  # fmt: skip


def ask(first: int, length: int, name: str, last: int = 0, new: int = 24) -> Request:
    prompt = [(first + n) % 20 for n in range(length)]
    prompt[-1] = last or prompt[-1]
    return Request(
        prompts=[prompt], proposer=name, max_new_tokens=new, temperature=first % 2, seed=first,
        eos=[], logprobs=1,
    )  # fmt: skip


def serve(request: Request, salt: str | None = None) -> Served:
    return engine().submit(request, cache_salt=salt).result(60)


def same(one: Served, other: Served) -> bool:
    """Whether tokens, guesses, counts and the bits of log-probabilities are equal."""

    def made(served: Served) -> tuple[object, ...]:
        bits = [x.tobytes() for x in jax.tree.leaves(served.logprobs)]
        return served.tokens, served.guesses, served.stats, bits

    return made(one) == made(other)


def test_pages_run_out_and_texts_stay():
    """Rows that give their pages to older ones go on with the same tokens, guesses and bits, which
    are delivered once; then all pages are back.  The tokens are those of `generate`."""
    made = engine()
    asks = [
        ask(first, length, name, new=40)
        for first, (length, name) in enumerate(
            [(12, "head"), (9, "none"), (6, "none"), (12, "head"), (5, "head"), (7, "none")]
        )
    ]
    compiled = made.compiled()
    handles = [made.submit(one) for one in asks]
    increments = [list(handle) for handle in handles[:2]]
    together = [handle.result(60) for handle in handles]
    assert made.load().set_back > 0
    for given, served in zip(increments, together, strict=False):
        assert [token for one in given for token in one.tokens] == served.tokens
    paging = made._scheduler._paging
    assert paging is not None
    store = paging.store
    assert store.available == store.count == COUNT
    for one, served in zip(asks, together, strict=True):
        assert same(serve(one), served)
        plain = {"proposer": "none", "temperature": one.temperature, "seed": one.seed, "eos": []}
        output = specjax.generate(target(), one.prompts, max_new_tokens=40, **plain)
        assert output.tokens[0] == served.tokens
    assert sum(served.stats.accepted for served in together) > 0
    assert made.compiled() == compiled


def test_a_turn_has_the_steps_that_there_are_pages_for(monkeypatch):
    """Half as many, and half of these, until there are enough: single steps cost the host more."""
    made, tried = engine()._scheduler, []

    def cover(self: Paging, running, steps: int) -> bool:
        tried.append(steps)
        return steps <= 6

    def steps() -> int:
        with monkeypatch.context() as patched:
            patched.setattr(Paging, "cover", cover)
            return made._make_room(40)

    assert made.call(steps) == 5 and tried == [40, 20, 10, 5]


def test_a_row_that_was_set_back_is_cancelled_with_its_text(monkeypatch):
    made = engine()
    first, _, third = (made.submit(ask(n, 9, "none", new=50)) for n in (2, 4, 6))
    next(iter(third))
    scheduler, leave = made._scheduler, Paging.leave

    def leaves(self: Paging, slot: int) -> None:
        """Cancel the third request as soon as it is set back."""
        leave(self, slot)
        if not third.done() and scheduler._slots[slot].handle is third:
            third.cancel()

    monkeypatch.setattr(Paging, "leave", leaves)
    assert len(first.result(60).tokens) == 50
    served = third.result(60)
    assert served.finish == "cancelled" and 0 < len(served.tokens) < 50
    assert served.tokens == serve(ask(6, 9, "none", new=50)).tokens[: len(served.tokens)]


def test_beginnings_are_shared():
    """Of prompts of one salt, with the drafts and bits of a prompt that was read."""
    for name in ("none", "head"):
        alone = serve(ask(7, 36, name, last=3, new=8), salt=f"alone {name}")
        other = serve(ask(7, 36, name, last=5, new=8), salt=f"shared {name}")
        shared = serve(ask(7, 36, name, last=3, new=8), salt=f"shared {name}")
        assert (alone.copied, other.copied, shared.copied) == (0, 0, 32)
        assert same(alone, shared)


def test_a_speculative_page_in_the_tree_is_found(monkeypatch):
    """If drafts that nobody accepted went into the tree with the page that has room for them, the
    next prompt that begins with them would read other keys: the text shows it."""
    short, long = ask(9, 20, "none", new=2), ask(9, 36, "none", new=12)
    alone = serve(long, salt="alone")
    insert, prompts = Paging.insert, long.prompts
    assert isinstance(prompts, list)

    def drafts(self: Paging, slot: int, row, salt, pages, reading, snapshots) -> None:
        insert(self, slot, row, salt, pages, reading, snapshots)
        guessed = np.asarray(prompts[0], np.int32)
        self.store.keep(salt, row.uses, guessed[: len(pages) * PAGE + 2], pages, reading)

    monkeypatch.setattr(Paging, "insert", drafts)
    serve(short, salt="fault")
    faulty = serve(long, salt="fault")
    assert faulty.copied > 16 and not same(alone, faulty)
    monkeypatch.setattr(Paging, "insert", insert)
    serve(short, salt="right")
    right = serve(long, salt="right")
    assert right.copied == 16 and same(alone, right)


def test_prompts_that_are_read_together_have_the_bits_they_have_alone(monkeypatch):
    """Of several lengths; a pass that mixes up its rows is found when the engine starts."""
    settings: dict[str, Any] = {
        "slots": 4, "capacity": 32, "chunk": 4, "cache_tokens": 12 * PAGE, "page": PAGE,
        "logprobs": 1,
    }  # fmt: skip
    with Engine(target(), **settings) as made:
        device, passes, compiled = made._device, [], made.compiled()
        assert device.together(4) == ROWS
        read = device.read_together

        def counted(readings: list[Reading], *given: Any) -> list[Reading]:
            passes.append(len(readings))
            return read(readings, *given)

        monkeypatch.setattr(device, "read_together", counted)
        asks = [ask(n, 9 + n % 5, "none", new=6) for n in range(12)]
        made.pause("in_place")
        handles = [made.submit(one, cache_salt="together") for one in asks]
        made.go_on()
        together = [handle.result(60) for handle in handles]
        assert passes and set(passes) == {ROWS}
        del passes[:]
        for one, served in zip(asks, together, strict=True):
            assert same(made.submit(one, cache_salt="alone").result(60), served)
        assert not passes and made.compiled() == compiled
    mixed = Device._rows_read_on

    def mixing(self: Device, *given: Any) -> Any:
        readings, pools = mixed(self, *given)
        return readings[::-1], pools

    monkeypatch.setattr(Device, "_rows_read_on", mixing)
    with Engine(target(), **settings) as made:
        assert made._device.together(4) == 1


def test_the_prompts_that_are_read_together_are_in_the_bytes_that_are_checked(monkeypatch):
    """The caches of each that have no pages; nothing is compiled."""

    class Checked(Exception):
        pass

    def needed_for(rows: int) -> int:
        def require(needed: int, *_: object) -> None:
            raise Checked(needed)

        monkeypatch.setattr("specjax.serve.batch.require", require)
        monkeypatch.setattr("specjax.serve.batch.ROWS", rows)
        with pytest.raises(Checked) as checked:
            Engine(target(), slots=4, capacity=32, chunk=4, cache_tokens=12 * PAGE, page=PAGE)
        return checked.value.args[0]

    alone = needed_for(1)
    assert 0 < 3 * (needed_for(2) - alone) == needed_for(4) - alone


def test_what_earlier_rows_left_is_not_seen():
    """Not even where it is not a number, which 0 times a slot that is not seen would spread."""
    made = engine()
    asks = [ask(first, 20, ("none", "head")[first % 2], new=30) for first in range(4)]
    wanted = [serve(one, salt="before") for one in asks]
    paging = made._scheduler._paging
    assert paging is not None
    taken = paging.store.take(COUNT)  # nothing is left in the tree
    assert taken is not None
    paging.store.release(taken)
    device = made._device
    device.pools = jax.tree.map(lambda x: x.at[1:].set(np.nan), device.pools)
    handles = [made.submit(one, cache_salt="after") for one in asks]
    assert all(same(*two) for two in zip(wanted, [h.result(60) for h in handles], strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache_tokens": 64}, r"cache_tokens=64 are 4 pages of 16 tokens, .* or more, or a small"),
        ({"page": 24}, "page=24; pass one of 16, 32, 64 and 128"),
        ({"cache_tokens": 0}, "cache_tokens"),
    ],
)
def test_refused(changes: dict[str, int], message: str):
    settings: dict[str, Any] = {
        "slots": 2,
        "capacity": 64,
        "chunk": 16,
        "cache_tokens": 128,
        "page": PAGE,
    }
    with pytest.raises(ValueError, match=message):
        Engine(target(), **{**settings, **changes})


def test_several_processes_are_refused(monkeypatch):
    """What happens to pages is no decision that process 0 sends, so the others would wait."""
    monkeypatch.setattr("specjax.serve.engine._is_spread", lambda target: True)
    with pytest.raises(ValueError, match="cache_tokens=128: an engine over several processes"):
        Engine(target(), slots=2, capacity=64, chunk=16, cache_tokens=128)


def test_a_cache_of_ones_own_is_refused():
    own = LanguageModel(TABLES.model(), TABLES.weights(), None, (), "own")
    with pytest.raises(ValueError, match=r"the cache of own cannot have pages.*leave\s+cache_t"):
        Engine(own, slots=2, capacity=32, cache_tokens=256)


def test_what_a_device_was_given_stays_as_it_was():
    """XLA:CPU reads arrays of the host where they lie, and a turn may begin later than the next one
    is prepared: other pages would then belong to its rows."""
    given: list[np.ndarray] = []
    made: Any = object.__new__(Paging)
    made._device = types.SimpleNamespace(place=lambda *arrays: given.extend(arrays))
    made._sizes = types.SimpleNamespace(of_a_row=2)
    made._pages, made._tables, made._uses = [[3, 1]], np.zeros((1, 2), np.int32), np.ones((1, 1))
    made._show(0)
    made.place()
    made._pages[0], made._uses[0] = [5], 0
    made._show(0)
    assert given[0].tolist() == [[3, 1]] and given[1].tolist() == [[1]]
