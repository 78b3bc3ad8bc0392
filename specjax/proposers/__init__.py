"""Proposers: where guesses come from.  Losslessness never depends on them."""

from specjax.proposers.draft_model import DraftModel
from specjax.proposers.ngram import NGram
from specjax.proposers.none import NoProposer
from specjax.types import Proposer

PROPOSERS: dict[str, type[Proposer]] = {"none": NoProposer, "draft": DraftModel, "ngram": NGram}

__all__ = ["PROPOSERS", "DraftModel", "NGram", "NoProposer"]
