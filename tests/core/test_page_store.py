"""The pages of an engine: who holds which, and the tree of prompts, over drawn sequences."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest

from specjax.serve.pages import PageStore

PAGE, COUNT = 4, 24


@dataclasses.dataclass
class Row:
    """A row as an engine has it: what it holds, and the texts that are in its pages."""

    tokens: np.ndarray
    pages: list[int]
    shared: int  # pages of the beginning


class Engine:
    """The steps of an engine on pages, with the text that each page holds."""

    def __init__(self, chunk: int, lag: int, seed: int) -> None:
        self.store = PageStore(COUNT, PAGE, chunk, lag)
        self.drawn = np.random.default_rng(seed)
        self.rows: list[Row] = []
        self.texts: dict[int, bytes] = {}  # page -> the tokens up to its end, with its salt
        self.hits = 0

    def prompt(self) -> np.ndarray:
        """Prompts of three beginnings."""
        head = np.arange(40, dtype=np.int32) % (3 + self.drawn.integers(3))
        tail = self.drawn.integers(9, 12, self.drawn.integers(0, 9))
        return np.concatenate([head[: self.drawn.integers(1, 40)], tail]).astype(np.int32)

    def begin(self) -> None:
        tokens, store = self.prompt(), self.store
        salt = str(self.drawn.integers(2))
        uses = frozenset(range(self.drawn.integers(3)))
        found = store.find(salt, uses, tokens)
        shared = [] if found is None else found.pages
        self.hits += len(shared)
        assert len(shared) * PAGE <= max(0, len(tokens) - 2) and not len(shared) * PAGE % store.step
        for index, page in enumerate(shared):  # the very text, of the same salt
            assert self.texts[page] == self.text(salt, tokens, index)
        store.hold(shared)
        taken = store.take(store.pages_for(len(tokens)) - len(shared))
        if taken is None:
            store.release(shared)
            return
        self.check_taken(taken)
        pages = shared + taken
        for index in range(len(shared), len(pages)):
            self.texts[pages[index]] = self.text(salt, tokens, index)
        store.keep(salt, uses, tokens, pages, object())
        # The last token is pending, so its page is still written.
        assert not any(map(store.shared, pages[(len(tokens) - 1 - store.lag) // PAGE :]))
        self.rows.append(Row(tokens, pages, len(shared)))

    def text(self, salt: str, tokens: np.ndarray, index: int) -> bytes:
        return salt.encode() + tokens[: (index + 1) * PAGE + self.store.lag].tobytes()

    def check_taken(self, pages: list[int]) -> None:
        """They belong to nobody else."""
        assert 0 not in pages and len(set(pages)) == len(pages)
        assert not any(map(self.store.shared, pages))
        assert not set(pages) & {page for row in self.rows for page in row.pages}

    def grow(self) -> None:
        if self.rows:
            row = self.rows[self.drawn.integers(len(self.rows))]
            taken = self.store.take(int(self.drawn.integers(3)))
            if taken is not None:
                self.check_taken(taken)
                row.pages += taken

    def end(self) -> None:
        if self.rows:
            row = self.rows.pop(self.drawn.integers(len(self.rows)))
            self.store.release(row.pages)

    def check(self) -> None:
        """Each page is free, or held by rows, or in the tree; two rows have the same one only if it
        is in the tree or was when the second one came."""
        held = collections.Counter(page for row in self.rows for page in row.pages)
        kept = {page for page in range(1, COUNT + 1) if self.store.shared(page)}
        assert self.store.free + len(set(held) | kept) == COUNT
        assert self.store.available == COUNT - len(held)
        for row in self.rows:
            own = row.pages[row.shared :]
            later = [one for one in self.rows if one is not row and set(one.pages) & set(own)]
            most = self.store.committed(len(row.tokens))
            for one in later:
                assert set(one.pages) & set(own) <= set(row.pages[:most])


@pytest.mark.parametrize(("chunk", "lag"), [(1, 0), (8, 0), (2, 1), (6, 3)])
def test_drawn_sequences(chunk: int, lag: int):
    hits = 0
    for seed in range(12):
        made = Engine(chunk, lag, seed)
        for _ in range(120):
            steps = made.begin, made.begin, made.grow, made.end
            steps[made.drawn.integers(4)]()
            made.check()
        while made.rows:
            made.end()
        made.check()
        taken = made.store.take(COUNT)  # all pages are back
        assert taken is not None and made.store.free == 0
        assert made.store.find("0", frozenset(), made.prompt()) is None
        hits += made.hits
    assert hits > 50


def test_the_least_recently_used_page_goes():
    store, nothing = PageStore(3, PAGE), frozenset[int]()
    prompts = [np.full(6, n, np.int32) for n in range(3)]
    for tokens in prompts[:2]:
        pages = store.take(1)
        assert pages is not None
        store.keep(None, nothing, tokens, pages, None)
        store.release(pages)
    assert store.find(None, nothing, prompts[0]) is not None  # a use
    assert store.take(2) is not None  # one page is free
    assert store.find(None, nothing, prompts[1]) is None
    assert store.find(None, nothing, prompts[0]) is not None
    assert store.take(1, spare=1) is None and store.take(1) is not None


def test_what_is_not_shared():
    """Other salts, drafters that did not read the prompt, and the end of a prompt."""
    store, tokens = PageStore(9, PAGE), np.arange(10, dtype=np.int32)
    pages = store.take(3)
    assert pages is not None
    store.keep("a", frozenset({1}), tokens, pages, "reading")

    def found(salt: str, uses: set[int], count: int = 10) -> list[int]:
        known = store.find(salt, frozenset(uses), tokens[:count])
        return [] if known is None else known.pages

    assert found("a", {1}) == found("a", set()) == pages[:2]
    assert found("b", {1}) == found("a", {2}) == found("a", {1, 2}) == []
    assert found("a", {1}, 9) == pages[:1] and found("a", {1}, 6) == pages[:1]
    assert found("a", {1}, 5) == []


def test_snapshots_stand_where_prompts_end_or_part():
    """A prompt goes on from the last snapshot on its path, and learns how far earlier ones were the
    same; the snapshots that were not used for the longest time leave first."""
    store = PageStore(COUNT, PAGE, chunk=8, snapshots=2)

    def tokens(count: int, last: int) -> np.ndarray:
        return np.array([*range(count), last, last], np.int32)

    def keep(prompt: np.ndarray, **snapshots: str) -> None:
        pages = store.take(store.pages_for(len(prompt)))
        assert pages is not None
        store.keep(None, frozenset(), prompt, pages, {int(k[2:]): v for k, v in snapshots.items()})
        store.release(pages)

    keep(tokens(24, 90), at24="end of one")
    found = store.find(None, frozenset(), tokens(17, 91))
    assert found is not None
    assert (found.pages, found.reading, found.seen) == ([], None, 16 // PAGE)
    keep(tokens(17, 91), at16="where they part")
    for prompt, reading, count in (
        (tokens(17, 92), "where they part", 16), (tokens(24, 93), "end of one", 24),
    ):  # fmt: skip
        found = store.find(None, frozenset(), prompt)
        assert found is not None
        assert (found.reading, len(found.pages) * PAGE) == (reading, count)
    keep(np.full(18, 50, np.int32), at16="another")
    found = store.find(None, frozenset(), tokens(24, 94))
    assert found is not None and found.reading == "end of one"
    found = store.find(None, frozenset(), tokens(17, 95))
    assert found is not None and found.reading is None, "the one that was used longest ago"
    assert store.available == COUNT
