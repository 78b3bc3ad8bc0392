"""`Paging`: gives rows their pages on the host, ahead of each turn, and the device its tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from specjax.serve.batch import Device, Row
from specjax.serve.pages import PageStore
from specjax.serve.reading import Reading


@dataclasses.dataclass(frozen=True)
class Begun:
    """A prompt whose reading begins.

    Attributes:
      reading: with the known beginning.
      count: tokens of that.
      pages: of the row.
      marks: the tokens after which a snapshot is wanted.
    """

    reading: Reading
    count: int
    pages: list[int]
    marks: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Running:
    """A row that takes part in a turn."""

    slot: int
    length: int  # of prompt and output, as the host knows it
    ahead: int  # steps that the device was asked for, whose tokens the host does not know
    row: Row


class Paging:
    """Holds the pages of the rows in the slots of a batch."""

    def __init__(self, device: Device) -> None:
        sizes = device.pages
        assert sizes is not None
        self._device, self._sizes = device, sizes
        lag = max([0, *device.lags])
        self.store = PageStore(sizes.count, sizes.page, device.chunk, lag, device.snapshots)
        self._pages: list[list[int]] = [[] for _ in range(device.slots)]
        self._tables = np.zeros((device.slots, sizes.of_a_row), np.int32)
        self._uses = np.zeros((device.slots, len(device.several.parts)), bool)
        self._changed = True

    def begin(self, row: Row, salt: str | None, known: int, running: int) -> Begun | None:
        """Takes pages for a prompt, with those of its beginning that the tree has.

        Args:
          salt: as for `Engine.submit`.
          known: tokens of the prompt, and of the output if the row was set back.
          running: rows that write; each may need another page soon.

        Returns:
          None if there are too few pages.
        """
        store, device = self.store, self._device
        found = store.find(salt, row.uses, row.tokens) if device.copies else None
        shared = [] if found is None else found.pages
        # A drafter that writes the last slots of the beginning again gets a page of its own there.
        own = shared[-1:] if any(device.lags[part] for part in row.uses) else []
        store.hold(shared)
        needed = self._needed(row, known) - len(shared) + len(own)
        taken = store.take(needed, running)
        if taken is None:
            store.release(shared)
            return None
        device.clear(taken)
        pages = shared[: len(shared) - len(own)] + taken
        for page in own:
            device.copy_page(page, taken[0])
        store.release(own)
        table, marks = self._table(pages), frozenset[int]()
        if store.snapshots is not None:
            last = store.committed(len(row.tokens)) * store.page // store.step * store.step
            marks = frozenset({last, found.seen * store.page if found else 0})
        if found is None or not shared:
            return Begun(device.place_reading(device.empty(), table), 0, pages, marks)
        count = len(shared) * store.page
        return Begun(device.first(found.reading, count, table), count, pages, marks - {count})

    def insert(
        self,
        slot: int,
        row: Row,
        salt: str | None,
        pages: list[int],
        reading: Reading,
        snapshots: dict[int, Reading],
    ) -> None:
        """Gives a slot the pages of a row, and keeps those of its prompt in the tree."""
        if self._device.copies:
            kept = reading if self.store.snapshots is None else snapshots
            self.store.keep(salt, row.uses, row.tokens, pages, kept)
        self._pages[slot] = pages
        self._uses[slot] = [part in row.uses for part in range(self._uses.shape[1])]
        self._show(slot)

    def leave(self, slot: int) -> None:
        """Takes the pages of a slot whose row has ended or was set back."""
        if self._pages[slot]:
            self.store.release(self._pages[slot])
            self._pages[slot] = []
            self._show(slot)

    def cover(self, running: Sequence[Running], steps: int) -> bool:
        """Gives rows the pages that `steps` steps may write; returns False if there are too few."""
        more = []
        for one in running:
            parts = self._device.parts_of(one.row)
            depth = max([0, *(self._device.several.parts[part].max_depth for part in parts)])
            most = min(one.length + (one.ahead + steps) * (depth + 1), one.row.limit)
            more.append(max(0, self._needed(one.row, most) - len(self._pages[one.slot])))
        taken = self.store.take(sum(more))
        if taken is None:
            return False
        if taken:
            self._device.clear(taken)
        for one, count in zip(running, more, strict=True):
            if count:
                self._pages[one.slot] += taken[:count]
                del taken[:count]
                self._show(one.slot)
        return True

    def place(self) -> None:
        """Shows the device the tables, if they have changed."""
        if self._changed:
            # A program that waits for the turn before it may still read the host's own arrays.
            self._device.place(self._tables.copy(), self._uses.copy())
            self._changed = False

    def _needed(self, row: Row, tokens: int) -> int:
        """Returns the pages of a row of `tokens` tokens, and of what it may write after them."""
        ahead = self._sizes.ahead
        behind = max([ahead[0], *(ahead[1 + part] for part in row.uses)])
        return min(self.store.pages_for(tokens + behind), self._sizes.of_a_row)

    def _table(self, pages: list[int]) -> np.ndarray:
        table = np.zeros(self._sizes.of_a_row, np.int32)
        table[: len(pages)] = pages
        return table

    def _show(self, slot: int) -> None:
        self._tables[slot] = self._table(self._pages[slot])
        self._changed = True
