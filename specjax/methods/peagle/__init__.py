"""P-EAGLE: source, the folders that it is published in, and its learner."""

from specjax.methods.peagle.reader import PEAGLE
from specjax.methods.peagle.source import PEagleSource

__all__ = [
    "PEAGLE",
    "PEagleSource",
]
