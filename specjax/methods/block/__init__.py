"""Block drafts: DFlash, DSpark and Domino, with the corrections of their slots."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.methods.block.correction import Correction, Slot
    from specjax.methods.block.dflash import DFLASH
    from specjax.methods.block.domino import DOMINO
    from specjax.methods.block.dspark import DSPARK
    from specjax.methods.block.markov import MarkovHead
    from specjax.methods.block.network import (
        BlockDraft,
        BlockDraftConfig,
        block_axes,
        initial_block,
        stage_context,
    )
    from specjax.methods.block.prefix_gru import PrefixGRU
    from specjax.methods.block.selector import CandidateSelector
    from specjax.methods.block.source import BlockDraftSource

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "DFLASH",
    "DOMINO",
    "DSPARK",
    "BlockDraft",
    "BlockDraftConfig",
    "BlockDraftSource",
    "CandidateSelector",
    "Correction",
    "MarkovHead",
    "PrefixGRU",
    "Slot",
    "block_axes",
    "initial_block",
    "stage_context",
]
