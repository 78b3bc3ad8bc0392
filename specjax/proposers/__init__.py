"""Proposers make the drafts.  Losslessness never depends on them.

A shape (`Chain`, `StaticTree`, `DynamicTree`) arranges the drafts of a source, which predicts one
token at a time.  `ChoiceTree` and `BestFirst` arrange the drafts of a block source, which predicts
several tokens in one pass.  `NGram`, `DatastoreLookup` and `NoProposer` need no model.
"""

from collections.abc import Callable

from specjax.contract import Proposer
from specjax.proposers.adaptive import PAUSE, Adaptive
from specjax.proposers.adaptive_state import MEASURED, AdaptiveParams, AdaptiveState
from specjax.proposers.combine import CostAware, CostAwareParams, FirstOf
from specjax.proposers.datastore import DatastoreLookup
from specjax.proposers.forced import Forced
from specjax.proposers.ngram import NGram
from specjax.proposers.plain import NoProposer
from specjax.proposers.rates import Rates
from specjax.proposers.shapes import (
    BestFirst,
    Chain,
    Choices,
    ChoiceTree,
    DynamicTree,
    Shape,
    StaticTree,
    best_tree,
    expected_length,
    measure_ranks,
    node_acceptance,
)
from specjax.proposers.sources import (
    AT_ONCE,
    DEPTH,
    BlockDraftSource,
    DatastoreParams,
    DatastoreSource,
    DraftSource,
    Eagle3Source,
    EarlyExitSource,
    MedusaParams,
    MedusaSource,
    PEagleSource,
    TranslatedParams,
    TranslatedSource,
    look_up,
)
from specjax.proposers.table import DraftModel, DraftTree, EarlyExit, Medusa, Universal

PROPOSERS: dict[str, Callable[..., Proposer]] = {
    "none": NoProposer,
    "datastore": DatastoreLookup,
    "draft": DraftModel,
    "tree": DraftTree,
    "dynamic-tree": DynamicTree,
    "early-exit": EarlyExit,
    "first-of": FirstOf,
    "forced": Forced,
    "medusa": Medusa,
    "ngram": NGram,
    "universal": Universal,
}
"""The class or function that makes a proposer, by its name on the command line."""

UniversalParams = TranslatedParams

__all__ = [
    "AT_ONCE",
    "DEPTH",
    "MEASURED",
    "PAUSE",
    "PROPOSERS",
    "Adaptive",
    "AdaptiveParams",
    "AdaptiveState",
    "BestFirst",
    "BlockDraftSource",
    "Chain",
    "ChoiceTree",
    "Choices",
    "CostAware",
    "CostAwareParams",
    "DatastoreLookup",
    "DatastoreParams",
    "DatastoreSource",
    "DraftModel",
    "DraftSource",
    "DraftTree",
    "DynamicTree",
    "Eagle3Source",
    "EarlyExit",
    "EarlyExitSource",
    "FirstOf",
    "Forced",
    "Medusa",
    "MedusaParams",
    "MedusaSource",
    "NGram",
    "NoProposer",
    "PEagleSource",
    "Rates",
    "Shape",
    "StaticTree",
    "TranslatedParams",
    "TranslatedSource",
    "Universal",
    "UniversalParams",
    "best_tree",
    "expected_length",
    "look_up",
    "measure_ranks",
    "node_acceptance",
]
