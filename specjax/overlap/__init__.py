"""Drafts on one mesh while the target verifies on another."""

from specjax.overlap.outcomes import Foresight
from specjax.overlap.overlap import Overlapped, check_meshes, overlapped
from specjax.overlap.sides import UnreadCache
from specjax.overlap.steps import OverlapState

__all__ = [
    "Foresight",
    "OverlapState",
    "Overlapped",
    "UnreadCache",
    "check_meshes",
    "overlapped",
]
