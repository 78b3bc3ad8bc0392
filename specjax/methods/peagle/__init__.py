"""P-EAGLE: its source, published folders and learner."""

from specjax.methods.peagle.reader import PEAGLE
from specjax.methods.peagle.source import PEagleSource

__all__ = [
    "PEAGLE",
    "PEagleSource",
]
