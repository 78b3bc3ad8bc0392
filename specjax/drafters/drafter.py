"""`Drafter`: a proposer with its weights, whatever it was made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from specjax.arguments import shown
from specjax.contract import Arrays, Proposer
from specjax.models import LanguageModel
from specjax.parallel import beside, mesh_of
from specjax.proposers import FirstOf

Adapter = str | Sequence[str | None] | None
"""The adapter of all prompts by name, or one, or None for plain decoding, a prompt."""

MakeArrays = Callable[[LanguageModel], Arrays]
"""Makes `Params.proposer`, given the target as it lies on its devices.

It comes apart from the proposer because it may compile: everything else is checked before."""


@dataclasses.dataclass(frozen=True, eq=False)
class Drafter:
    """What loaders of drafters return, and `generate(drafter=...)` takes."""

    proposer: Proposer
    params: Any = None  # the proposer's arrays
    name: str = "drafter"  # of its folder, for messages

    @property
    def reader(self) -> LanguageModel | None:
        """The draft that reads every token of the target's text, and so needs as many positions."""
        return None

    @property
    def has_adapters(self) -> bool:
        """Does each row choose one of its adapters?"""
        return False

    def check(self, target: LanguageModel) -> None:
        """Raises ValueError for a target that it was not made for.  By default it takes any."""

    def for_rows(self, target: LanguageModel, adapter: Adapter, rows: int) -> MakeArrays:
        """What makes `Params.proposer` for so many prompts.

        Raises:
          ValueError: another target than it was made for, or an adapter that it does not have.
        """
        del rows
        if adapter is not None:
            raise ValueError(
                f"adapter={shown(adapter)} chooses from a bank: pass a MedusaBank as drafter="
            )
        self.check(target)
        return lambda laid: self.params

    def arrays(self, target: LanguageModel, rows: int = 1, adapter: Adapter = None) -> Arrays:
        """`Params.proposer` for so many prompts, on the target's mesh.

        Raises:
          ValueError: as `for_rows`.
        """
        return beside(self.for_rows(target, adapter, rows)(target), mesh_of(target.params))


@dataclasses.dataclass(frozen=True, eq=False)
class BoundDrafter(Drafter):
    """A proposer whose parameters are those of the target, of a draft model, or none."""

    draft: LanguageModel | None = None  # its form, for the checks
    make_draft: Callable[[LanguageModel], LanguageModel] | None = None  # from the target as it lies

    @property
    def reader(self) -> LanguageModel | None:
        return self.draft

    def check(self, target: LanguageModel) -> None:
        self.proposer.bind(target, self.draft)

    def for_rows(self, target: LanguageModel, adapter: Adapter, rows: int) -> MakeArrays:
        super().for_rows(target, adapter, rows)
        made = self.make_draft
        return lambda laid: self.proposer.bind(laid, self.draft if made is None else made(laid))


@dataclasses.dataclass(frozen=True, eq=False)
class EitherDrafter(Drafter):
    """`FirstOf` of two drafters, each with its own weights."""

    parts: tuple[Drafter, ...] = ()

    @property
    def reader(self) -> LanguageModel | None:
        readers = [part.reader for part in self.parts if part.reader is not None]
        return min(readers, key=lambda draft: draft.model.max_positions, default=None)

    @property
    def has_adapters(self) -> bool:
        return any(part.has_adapters for part in self.parts)

    def check(self, target: LanguageModel) -> None:
        for part in self.parts:
            part.check(target)

    def for_rows(self, target: LanguageModel, adapter: Adapter, rows: int) -> MakeArrays:
        chooses = [part for part in self.parts if part.has_adapters]
        if adapter is not None and not chooses:
            super().for_rows(target, adapter, rows)
        makers = [
            part.for_rows(target, adapter if part in chooses else None, rows) for part in self.parts
        ]
        return lambda laid: tuple(make(laid) for make in makers)


def first_of(first: Drafter | Proposer, second: Drafter | Proposer) -> Drafter:
    """`first` where it proposes anything for a row, else `second`, as `FirstOf`, with the weights of both.

    Raises:
      ValueError: proposers of different depths, or one that can only be used alone.
    """
    parts = tuple(
        part if isinstance(part, Drafter) else BoundDrafter(part) for part in (first, second)
    )
    proposer = FirstOf(parts[0].proposer, parts[1].proposer)
    return EitherDrafter(proposer, name=" or ".join(part.name for part in parts), parts=parts)
