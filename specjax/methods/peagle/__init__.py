"""P-EAGLE: its source, published folders and learner."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.methods.peagle.reader import PEAGLE
    from specjax.methods.peagle.source import PEagleSource

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "PEAGLE",
    "PEagleSource",
]
