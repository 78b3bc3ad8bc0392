"""`Drafter`: a proposer with its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specjax._internal.checks import shown
from specjax.contract import ArrayTree, Proposer
from specjax.models import LanguageModel
from specjax.parallel import mesh_of, replicate
from specjax.proposers import FirstOf

Adapter = str | Sequence[str | None] | None
"""The name of one adapter for all prompts, or a list with a name or None for each prompt.

In a list None means plain decoding of that prompt.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class Drafter:
    """A proposer with its weights, which loaders return and `generate(drafter=...)` takes."""

    proposer: Proposer
    params: Any = None  # the proposer's
    name: str = "drafter"  # of its folder, for messages

    @property
    def reader(self) -> LanguageModel | None:
        """The draft model that reads the whole text and so limits its length, or None."""
        return None

    @property
    def weights(self) -> Any:
        """The arrays of its own that a step reads, in any structure; their dtypes are asked for."""
        return self.params, None if self.reader is None else self.reader.params

    @property
    def has_adapters(self) -> bool:
        """True if each row can choose an adapter."""
        return False

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The names that a row of an engine can choose from, in the order of their slots."""
        return ()

    def check(self, target: LanguageModel) -> None:
        """Raises ValueError if the drafter was made for another target; the default accepts any."""

    def shaped(self, shape: Callable[..., Proposer], **numbers: object) -> Drafter:
        """Returns this drafter with another shape: `shaped(StaticTree, branching=(3, 2))`.

        Raises:
          ValueError: the drafter has no source that a shape could arrange, the shape does not take
            this source, or the source does not allow the numbers.
        """
        del shape, numbers
        raise ValueError(
            f"the drafts of {self.name} cannot be arranged in another shape: leave shape= out"
        )

    def slots(self, adapter: Adapter, rows: int) -> np.ndarray | None:
        """Returns the slot of each row's adapter [B] int32, on the host; None without adapters.

        Raises:
          ValueError: an adapter that this drafter does not have.
        """
        del rows
        if adapter is not None:
            raise ValueError(
                f"adapter={shown(adapter)} needs a bank of adapters: pass a MedusaBank as drafter="
            )
        return None

    def make(self, target: LanguageModel, slots: np.ndarray | None) -> ArrayTree:
        """Returns `Params.proposer`, from a target whose parameters are on their devices.

        It may compile, so it is called after all checks.

        Args:
          target: the target that `check` accepted.
          slots: as `slots` returns them.
        """
        del target, slots
        return self.params

    def arrays(self, target: LanguageModel, rows: int = 1, adapter: Adapter = None) -> ArrayTree:
        """Returns `Params.proposer` for `rows` prompts, on the target's mesh.

        Raises:
          ValueError: another target than the drafter was made for, or an adapter that it does not
            have.
        """
        slots = self.slots(adapter, rows)
        self.check(target)
        return replicate(self.make(target, slots), mesh_of(target.params))


@dataclasses.dataclass(frozen=True, eq=False)
class BoundDrafter(Drafter):
    """A proposer whose parameters are those of the target or of a draft model, or that has none."""

    draft: LanguageModel | None = None  # the draft model; with `make_draft` only for the checks
    # Makes the draft model whose weights are used; it gets the target.
    make_draft: Callable[[LanguageModel], LanguageModel] | None = None

    @property
    def reader(self) -> LanguageModel | None:
        return self.draft

    def check(self, target: LanguageModel) -> None:
        self.proposer.bind(target, self.draft)

    def make(self, target: LanguageModel, slots: np.ndarray | None) -> ArrayTree:
        del slots
        draft = self.draft if self.make_draft is None else self.make_draft(target)
        return self.proposer.bind(target, draft)


@dataclasses.dataclass(frozen=True, eq=False)
class EitherDrafter(Drafter):
    """`FirstOf` of two drafters, each with its own weights."""

    parts: tuple[Drafter, ...] = ()

    @property
    def weights(self) -> Any:
        return [part.weights for part in self.parts]

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

    def slots(self, adapter: Adapter, rows: int) -> np.ndarray | None:
        """Returns a column for each part that has adapters, or None."""
        chosen = [part.slots(adapter, rows) for part in self.parts if part.has_adapters]
        slots = [each for each in chosen if each is not None]
        return np.stack(slots, axis=1) if slots else super().slots(adapter, rows)

    def make(self, target: LanguageModel, slots: np.ndarray | None) -> ArrayTree:
        columns = iter(() if slots is None else slots.T)
        return tuple(
            part.make(target, next(columns) if part.has_adapters else None) for part in self.parts
        )


def first_of(first: Drafter | Proposer, second: Drafter | Proposer) -> Drafter:
    """Combines two drafters: each row takes the drafts of `first` if it has any, else of `second`.

    Raises:
      ValueError: proposers of different depths, or one that cannot be combined with others.

    Example:
      >>> target = specjax.load(specjax.shipped("tiny/target"))
      >>> draft = specjax.load(specjax.shipped("tiny/draft"))
      >>> draft_model = specjax.make_drafter(target, draft, num_drafts=4)
      >>> specjax.first_of(specjax.NGram(4), draft_model).proposer.max_depth
      4
    """
    parts = tuple(
        part if isinstance(part, Drafter) else BoundDrafter(part) for part in (first, second)
    )
    proposer = FirstOf(parts[0].proposer, parts[1].proposer)
    return EitherDrafter(proposer, name=" or ".join(part.name for part in parts), parts=parts)
