"""The kernel of products with codes of a layout."""

from __future__ import annotations

from specjax.kernels.codes import Codes
from specjax.kernels.coding import Coding
from specjax.kernels.digits import Digits
from specjax.kernels.forms import Machine
from specjax.kernels.rounded_codes import RoundedCodes
from specjax.kernels.shorts import Shorts
from specjax.kernels.tile_digits import TileDigits
from specjax.kernels.tiles import Tiles


def work_of(coding: Coding, machine: Machine, vnni: bool) -> Codes:
    """Returns the `sharing.Work` for a layout; `vnni` is as in `RoundedCodes`."""
    if coding.rounded:
        return RoundedCodes(coding, machine, vnni)
    if coding.digits:
        with_vnni = TileDigits if machine.byte_tiles else Digits
        return (with_vnni if vnni or coding.digits > 1 else Shorts)(coding, machine)
    return (Tiles if coding.tiles else Codes)(coding, machine)
