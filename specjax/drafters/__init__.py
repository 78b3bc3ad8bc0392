"""Drafters: a proposer together with its weights, for one target."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.drafters.adapting import (
        PRIOR,
        AdaptiveDrafter,
        adaptive,
        automatic,
        expecting,
        on_demand,
        tree_widths,
        widths_of,
    )
    from specjax.drafters.arranging import CHAIN, arrange, as_chain
    from specjax.drafters.by_name import NUMBERS, SELF, SHAPES, drafter_by_name, own_drafter
    from specjax.drafters.costs import calibrated, cost_aware
    from specjax.drafters.folder import load_drafter, load_mtp, open_drafter, save_drafter
    from specjax.methods import (
        Adapter,
        BoundDrafter,
        Drafter,
        MedusaAdapter,
        MedusaBank,
        PublishedDrafter,
        PublishedSource,
        Sizes,
        first_of,
        make_drafter,
        own_shardings,
        sizes_of,
        with_draft,
    )

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "CHAIN",
    "NUMBERS",
    "PRIOR",
    "SELF",
    "SHAPES",
    "Adapter",
    "AdaptiveDrafter",
    "BoundDrafter",
    "Drafter",
    "MedusaAdapter",
    "MedusaBank",
    "PublishedDrafter",
    "PublishedSource",
    "Sizes",
    "adaptive",
    "arrange",
    "as_chain",
    "automatic",
    "calibrated",
    "cost_aware",
    "drafter_by_name",
    "expecting",
    "first_of",
    "load_drafter",
    "load_mtp",
    "make_drafter",
    "on_demand",
    "open_drafter",
    "own_drafter",
    "own_shardings",
    "save_drafter",
    "sizes_of",
    "tree_widths",
    "widths_of",
    "with_draft",
]
