"""Proposers: where guesses come from.  Losslessness never depends on them."""

from specjax.proposers.draft_model import DraftModel
from specjax.proposers.draft_tree import DraftTree
from specjax.proposers.dynamic_tree import DynamicTree
from specjax.proposers.early_exit import EarlyExit
from specjax.proposers.first_of import FirstOf
from specjax.proposers.medusa import Medusa, MedusaParams
from specjax.proposers.ngram import NGram
from specjax.proposers.none import NoProposer
from specjax.proposers.universal import Universal, UniversalParams
from specjax.types import Proposer

PROPOSERS: dict[str, type[Proposer]] = {
    "none": NoProposer,
    "draft": DraftModel,
    "tree": DraftTree,
    "dynamic-tree": DynamicTree,
    "early-exit": EarlyExit,
    "first-of": FirstOf,
    "medusa": Medusa,
    "ngram": NGram,
    "universal": Universal,
}

__all__ = [
    "PROPOSERS",
    "DraftModel",
    "DraftTree",
    "DynamicTree",
    "EarlyExit",
    "FirstOf",
    "Medusa",
    "MedusaParams",
    "NGram",
    "NoProposer",
    "Universal",
    "UniversalParams",
]
