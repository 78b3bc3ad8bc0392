"""The tables of methods: of published drafters, of trainable ones, and of proposers.

A new method is a folder next to this file, and one line in `METHODS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from specjax.contract import Proposer
from specjax.methods.block import DFLASH, DOMINO, DSPARK
from specjax.methods.datastore import DatastoreLookup
from specjax.methods.draft_model import DraftModel, DraftTree, Universal
from specjax.methods.eagle3 import EAGLE3
from specjax.methods.early_exit import EarlyExit
from specjax.methods.gemma_assistant import ASSISTANT
from specjax.methods.medusa import MEDUSA, Medusa
from specjax.methods.mtp import MTP_FORMAT
from specjax.methods.peagle import PEAGLE
from specjax.methods.published import Format
from specjax.proposers import DynamicTree, FirstOf, Forced, NGram, NoProposer


@dataclasses.dataclass(frozen=True)
class Method:
    """A line of `METHODS`.

    Attributes:
      format: the folders that it is published in.
      learner: "module:function" that plans its `specjax.training.drafters.Learner`, which is
        imported when a drafter of this kind is trained; None: `train.drafter` does not train it.
      num_taps: the layers of the target that a drafter to be trained reads by default.
    """

    format: Format
    learner: str | None = None
    num_taps: int = 0


_HERE = "specjax.methods"

METHODS: dict[str, Method] = {
    "gemma-assistant": Method(ASSISTANT),
    "medusa": Method(MEDUSA),  # train.medusa trains its heads
    "mtp": Method(MTP_FORMAT, f"{_HERE}.mtp.learner:plan_mtp", 1),
    "dspark": Method(DSPARK, f"{_HERE}.block.learner:plan_dspark", 5),
    "domino": Method(DOMINO),
    "dflash": Method(DFLASH, f"{_HERE}.block.learner:plan_dflash", 5),
    "eagle3": Method(EAGLE3, f"{_HERE}.eagle3.learner:plan_eagle3", 3),
    "peagle": Method(PEAGLE, f"{_HERE}.peagle.learner:plan_peagle", 3),
}
"""The method of each name; the first whose format matches a folder reads it."""

FORMATS: dict[str, Format] = {name: method.format for name, method in METHODS.items()}
"""The format of each method of this library, by name."""

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
