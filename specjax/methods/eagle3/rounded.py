"""Drafters over pairs with their weights in int8, a quarter of the bytes in float32."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from specjax.methods.drafter import Drafter
from specjax.methods.published import PublishedDrafter
from specjax.models import int8_form, rounded_weights
from specjax.parallel import mesh_of


def drafter_in_int8(drafter: Drafter) -> PublishedDrafter:
    """Returns a drafter with the matrices of its network, and its own output matrix, in int8.

    Raises:
      ValueError: the drafter has no network over pairs, or is on a mesh.
    """
    source: Any = drafter.source if isinstance(drafter, PublishedDrafter) else None
    # Several MTP layers are no `EagleSource`, and each has a network over pairs.
    over_pairs = getattr(source, "takes_int8_head", False) and hasattr(source, "network")
    if not isinstance(drafter, PublishedDrafter) or not over_pairs:
        raise ValueError(
            f'dtype="int8" rounds EAGLE-3, P-EAGLE and MTP drafters, and {drafter.name} is another '
            "kind: leave dtype= out"
        )
    if mesh_of(drafter.params) is not None:
        raise ValueError(
            f'dtype="int8" is for a drafter on one device, and {drafter.name} is on a mesh: leave '
            "dtype= out"
        )
    own: dict[str, Any] = {**drafter.params}
    for part in ("network", "head"):
        if part in own:
            own[part] = rounded_weights(own[part])
    product = int8_form(source.network.dot_general)
    network = dataclasses.replace(source.network, dot_general=product)
    source = dataclasses.replace(source, network=network)
    proposer = dataclasses.replace(cast(Any, drafter.proposer), source=source)
    name = f"{drafter.name} in int8"
    return dataclasses.replace(drafter, params=own, source=source, proposer=proposer, name=name)
