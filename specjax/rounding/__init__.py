"""Matrices in few bits: rounding to nearest, GPTQ, and how far a rounded model is from its own."""

from typing import TYPE_CHECKING

from specjax._internal.lazily import lazily

if TYPE_CHECKING:
    from specjax.rounding.comparing import Distance, distance
    from specjax.rounding.folder import METHODS, quantise_folder
    from specjax.rounding.nearest import in_int4, int4_form
    from specjax.rounding.pieces import pieces_of

__getattr__ = lazily(__name__, __file__)

__all__ = [
    "METHODS",
    "Distance",
    "distance",
    "in_int4",
    "int4_form",
    "pieces_of",
    "quantise_folder",
]
