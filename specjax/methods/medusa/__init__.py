"""Medusa heads: network, source, banks of adapters, and folders, as engines read them."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.methods.medusa.drafter import MedusaAdapter, MedusaBank
    from specjax.methods.medusa.engines import HEAD_FORMATS, HeadTensors
    from specjax.methods.medusa.exports import read_heads, write_heads
    from specjax.methods.medusa.folder import load_medusa, save_medusa
    from specjax.methods.medusa.format import MEDUSA
    from specjax.methods.medusa.network import (
        MedusaHeads,
        initial_medusa,
        medusa_hidden,
        medusa_logits,
    )
    from specjax.methods.medusa.ranks import measure_ranks
    from specjax.methods.medusa.source import Medusa, MedusaParams, MedusaSource

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "HEAD_FORMATS",
    "MEDUSA",
    "HeadTensors",
    "Medusa",
    "MedusaAdapter",
    "MedusaBank",
    "MedusaHeads",
    "MedusaParams",
    "MedusaSource",
    "initial_medusa",
    "load_medusa",
    "measure_ranks",
    "medusa_hidden",
    "medusa_logits",
    "read_heads",
    "save_medusa",
    "write_heads",
]
