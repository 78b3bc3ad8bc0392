"""Drafts on one mesh while the target verifies on another."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.overlap.outcomes import Foresight
    from specjax.overlap.overlap import Overlapped, check_meshes, overlapped
    from specjax.overlap.sides import UnreadCache
    from specjax.overlap.steps import OverlapState

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "Foresight",
    "OverlapState",
    "Overlapped",
    "UnreadCache",
    "check_meshes",
    "overlapped",
]
