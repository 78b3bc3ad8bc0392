"""Drafters: a proposer with its weights, for a target."""

from specjax.drafters.bank import MedusaAdapter, MedusaBank
from specjax.drafters.pairing import pair

__all__ = [
    "MedusaAdapter",
    "MedusaBank",
    "pair",
]
