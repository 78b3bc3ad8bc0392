"""Proposers make the drafts.  Losslessness never depends on them.

A shape (`Chain`, `StaticTree`, `DynamicTree`) arranges the drafts of a source, which predicts one
token at a time.  `ChoiceTree` and `BestFirst` arrange the drafts of a block source, which predicts
several tokens in one pass.  `NGram` and `NoProposer` need no model.

The sources are in `specjax.methods`.
"""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily
from specjax._internal.moved import forward

if TYPE_CHECKING:
    from specjax.proposers.adaptive import (
        MEASURED,
        PAUSE,
        POLICY,
        RESTS,
        Adaptive,
        AdaptiveParams,
        AdaptiveState,
        Policy,
        Rates,
    )
    from specjax.proposers.aligned import Aligned
    from specjax.proposers.catch_up import AT_ONCE, remember, then_pending
    from specjax.proposers.combine import (
        Calibrated,
        CalibratedState,
        CostAware,
        CostAwareParams,
        FirstOf,
        Survival,
    )
    from specjax.proposers.forced import Forced
    from specjax.proposers.ngram import NGram
    from specjax.proposers.own_text import OwnText
    from specjax.proposers.plain import NoProposer
    from specjax.proposers.shapes import (
        BestFirst,
        BlockShape,
        Chain,
        Choices,
        ChoiceTree,
        DynamicTree,
        Shape,
        StaticTree,
        best_tree,
        expected_length,
        node_acceptance,
    )

_moved = forward(
    __name__,
    methods=(
        "DEPTH", "PROPOSERS", "BlockDraftSource", "DatastoreLookup", "DatastoreParams",
        "DatastoreSource", "DraftModel", "DraftSource", "DraftTree", "Eagle3Source", "EarlyExit",
        "EarlyExitSource", "Medusa", "MedusaParams", "MedusaSource", "PEagleSource",
        "TranslatedParams", "TranslatedSource", "Universal", "UniversalParams", "look_up",
        "measure_ranks",
    ),
)  # fmt: skip

__getattr__ = lazily(__name__, __file__, _moved)

__all__ = [
    "AT_ONCE",
    "MEASURED",
    "PAUSE",
    "POLICY",
    "RESTS",
    "Adaptive",
    "AdaptiveParams",
    "AdaptiveState",
    "Aligned",
    "BestFirst",
    "BlockShape",
    "Calibrated",
    "CalibratedState",
    "Chain",
    "ChoiceTree",
    "Choices",
    "CostAware",
    "CostAwareParams",
    "DynamicTree",
    "FirstOf",
    "Forced",
    "NGram",
    "NoProposer",
    "OwnText",
    "Policy",
    "Rates",
    "Shape",
    "StaticTree",
    "Survival",
    "best_tree",
    "expected_length",
    "node_acceptance",
    "remember",
    "then_pending",
]
