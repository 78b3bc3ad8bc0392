"""`DatastoreDrafter`: a proposer over a datastore, with its arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from specjax._internal.checks import settle
from specjax.contract import Proposer
from specjax.methods.drafter import Drafter
from specjax.models import LanguageModel
from specjax.proposers import Shape
from specjax.text import vocabulary_digest


@dataclasses.dataclass(frozen=True, eq=False)
class DatastoreDrafter(Drafter):
    """The drafter that `Datastore.drafter` returns; `params` are the arrays of the datastore."""

    vocabulary: str | None = None  # digest of the tokenizer that the datastore was built with

    def check(self, target: LanguageModel) -> None:
        """Raises ValueError if the target has another tokenizer or vocabulary."""
        words = None if target.tokenizer is None else vocabulary_digest(target.tokenizer)
        assert isinstance(self.proposer, Shape)
        size, own = target.model.vocab_size, self.proposer.source.vocab_size
        settle(
            (
                self.vocabulary is not None and words != self.vocabulary,
                f"the datastore {self.name} was built with another tokenizer than that of "
                f"{target.name}: build it again with --tokenizer set to the folder of this target",
            ),
            (
                size != own,
                f"the drafter of {self.name} was made for {own} tokens, and {target.name} has "
                f"{size}: call Datastore.drafter with this target",
            ),
        )

    def shaped(self, shape: Callable[..., Proposer], **numbers: object) -> DatastoreDrafter:
        assert isinstance(self.proposer, Shape)
        return dataclasses.replace(self, proposer=shape(self.proposer.source, **numbers))
