"""Formats of drafter folders.  `specjax.files.drafter` recognises a folder by this table."""

from specjax.files.drafters.dflash import DFLASH
from specjax.files.drafters.domino import DOMINO
from specjax.files.drafters.dspark import DSPARK
from specjax.files.drafters.eagle3 import EAGLE3
from specjax.files.drafters.format import Description, Export, Format, Tensors
from specjax.files.drafters.medusa import MEDUSA
from specjax.files.drafters.peagle import PEAGLE

FORMATS: dict[str, Format] = {
    "medusa": MEDUSA,
    "dspark": DSPARK,
    "domino": DOMINO,
    "dflash": DFLASH,
    "eagle3": EAGLE3,
    "peagle": PEAGLE,
}
"""Name -> format.  The first format that matches a folder reads it."""

__all__ = [
    "FORMATS",
    "Description",
    "Export",
    "Format",
    "Tensors",
]
