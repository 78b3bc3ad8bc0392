"""Drafters: a proposer together with its weights, for one target."""

from specjax.drafters.adapting import PRIOR, AdaptiveDrafter, adaptive, automatic, widths_of
from specjax.drafters.arranging import CHAIN, arrange, as_chain
from specjax.drafters.bank import MedusaAdapter, MedusaBank
from specjax.drafters.by_name import NUMBERS, SHAPES, drafter_by_name, own_drafter
from specjax.drafters.costs import cost_aware
from specjax.drafters.drafter import Adapter, BoundDrafter, Drafter, MakeArrays, first_of
from specjax.drafters.pairing import make_drafter, with_draft
from specjax.drafters.published import (
    PublishedDrafter,
    PublishedSource,
    Sizes,
    own_shardings,
    sizes_of,
)

__all__ = [
    "CHAIN",
    "NUMBERS",
    "PRIOR",
    "SHAPES",
    "Adapter",
    "AdaptiveDrafter",
    "BoundDrafter",
    "Drafter",
    "MakeArrays",
    "MedusaAdapter",
    "MedusaBank",
    "PublishedDrafter",
    "PublishedSource",
    "Sizes",
    "adaptive",
    "arrange",
    "as_chain",
    "automatic",
    "cost_aware",
    "drafter_by_name",
    "first_of",
    "make_drafter",
    "own_drafter",
    "own_shardings",
    "sizes_of",
    "widths_of",
    "with_draft",
]
