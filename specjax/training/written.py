"""Sequences with masks: answers to learn after their prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from specjax.training import conversations
from specjax.training.ordering import Rows, by_turns, numbered, shuffled
from specjax.training.trees import Row

_NEAR = 64
"""Rows that are searched for space."""


@dataclasses.dataclass(frozen=True, eq=False)
class Written:
    """Sequences with masks."""

    tokens: np.ndarray  # [R, T + 1] int32, right-padded
    drawn: np.ndarray  # [R, T] float32; 1 where the next token is part of an answer, to be learned
    limit: np.ndarray  # [R] int32; positions before the cut; shorter rows end with an EOS
    starts: np.ndarray | None = None  # [R, T] bool; where packed sequences begin; None: not packed
    origin: np.ndarray | None = None  # [R] the source of a row, if sources are mixed
    weights: tuple[float, ...] = ()  # of the sources

    @classmethod
    def of(
        cls, rows: Sequence[conversations.Row], length: int, cut: Sequence[int] | None = None
    ) -> Written:
        """Makes sequences from ids [L] and masks [L] bool, cut or padded to `length` + 1 tokens.

        Sequences without a learned token are skipped, and their number is printed.  `cut` has the
        largest length that each row could have reached when it was written (`dataset.cuts`).
        """
        tokens = np.zeros((len(rows), length + 1), np.int32)
        drawn = np.zeros((len(rows), length), np.float32)
        for row, (ids, mask) in enumerate(rows):
            ids = ids[: length + 1]
            tokens[row, : len(ids)] = ids
            drawn[row, : len(ids) - 1] = mask[1 : length + 1]
        full = np.asarray(drawn.any(1))
        if not full.any():
            raise ValueError(
                f"every prompt fills --sequence-length {length}: "
                "nothing of an answer is left to learn"
            )
        if not full.all():
            print(
                f"skipped {(~full).sum()} of {len(rows)} sequences: "
                f"their prompts fill {length} tokens"
            )
        limit = np.full(len(rows), length) if cut is None else np.minimum(np.array(cut) - 1, length)
        return cls(tokens, drawn, limit.astype(np.int32)).at(full)

    @classmethod
    def joined(cls, parts: Mapping[int, Written], weights: tuple[float, ...]) -> Written:
        """Returns rows, which are not packed, of sources by number; each has its weight's share."""
        arrays = zip(*((x.tokens, x.drawn, x.limit) for x in parts.values()), strict=True)
        tokens, drawn, limit = (np.concatenate(x) for x in arrays)
        origin = np.concatenate([np.full(len(x.tokens), i) for i, x in parts.items()])
        return cls(tokens, drawn, limit, None, origin, weights)

    def at(self, rows: np.ndarray) -> Written:
        """Returns the rows that a mask [R] bool or an array of row numbers selects."""
        starts, origin = (None if x is None else x[rows] for x in (self.starts, self.origin))
        picked = (self.tokens[rows], self.drawn[rows], self.limit[rows])
        return Written(*picked, starts, origin, self.weights)

    def split(self, out_of: int = 100) -> tuple[Written, Written]:
        """Returns training rows and held-out rows (one in `out_of`, but at least one)."""
        held = np.arange(len(self.tokens)) % out_of == 0
        return self.at(~held), self.at(held)

    def row(self, number: int) -> Row:
        """Returns a row, with `starts` if sequences are packed."""
        row: Row = {
            "tokens": self.tokens[number],
            "drawn": self.drawn[number],
            "limit": self.limit[number],
        }
        return row if self.starts is None else {**row, "starts": self.starts[number]}

    def in_order(self) -> Rows:
        """Returns each row once."""
        return numbered(self.row, len(self.tokens))

    def rows(self, seed: int) -> Rows:
        """Returns the rows in an endless order, reshuffled every epoch."""
        if not len(self.tokens):
            raise ValueError(
                "the target wrote one sequence, which is held out, so none is left for training: "
                "let it write more"
            )
        if self.origin is None:
            return shuffled(len(self.tokens), seed, lambda _, number: self.row(number))
        at = [np.flatnonzero(self.origin == source) for source in np.unique(self.origin)]
        parts = [
            shuffled(len(rows), seed, lambda _, number, rows=rows: self.row(int(rows[number])))
            for rows in at
        ]
        return by_turns(parts, [self.weights[self.origin[rows[0]]] for rows in at])

    def packed(self) -> Written:
        """Packs short sequences into rows, as many into each as fit.

        Sequences are taken in order, and each goes to the first of the last rows with space for it.
        `starts` marks their beginnings, so that they do not attend to each other.
        """
        length = self.drawn.shape[1]
        # Up to the last learned token; what follows it changes nothing.
        sizes = (length - self.drawn[:, ::-1].argmax(1) + 1).tolist()
        rows: list[list[int]] = []
        room: list[int] = []
        for number, size in enumerate(sizes):
            near = range(max(0, len(rows) - _NEAR), len(rows))
            origin = None if self.origin is None else self.origin[number]
            fits = (
                row
                for row in near
                if room[row] >= size
                and (self.origin is None or self.origin[rows[row][0]] == origin)
            )
            row = next(fits, None)
            if row is None:
                row = len(rows)
                rows.append([])
                room.append(length + 1)
            rows[row].append(number)
            room[row] -= size
        tokens = np.zeros((len(rows), length + 1), np.int32)
        drawn, starts = (np.zeros((len(rows), length), kind) for kind in (np.float32, bool))
        for row, numbers in enumerate(rows):
            at = 0
            for number in numbers:
                size = sizes[number]
                tokens[row, at : at + size] = self.tokens[number, :size]
                drawn[row, at : at + size - 1] = self.drawn[number, : size - 1]
                starts[row, at] = True
                at += size
        print(
            f"packed {len(sizes)} sequences into {len(rows)} rows, which are "
            f"{sum(sizes) / tokens.size:.0%} full",
            flush=True,
        )
        kept = np.array([numbers[0] for numbers in rows])
        origin = None if self.origin is None else self.origin[kept]
        limit = np.full(len(rows), length, np.int32)
        return Written(tokens, drawn, limit, starts, origin, self.weights)
