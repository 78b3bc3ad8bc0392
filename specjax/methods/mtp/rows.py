"""The table of an MTP layer's tensors, by which it is read and written."""

from __future__ import annotations

import dataclasses
import functools
from typing import cast

import jax
from flax.traverse_util import flatten_dict

from specjax.files import rows_of
from specjax.methods.mtp.network import MtpConfig, mtp_shapes
from specjax.methods.published import Tensors, dense_rows
from specjax.models import Family, MtpNames, Tensor

_OWN = "model.layers.0."


def network_rows(
    c: MtpConfig, family: Family, names: MtpNames, layers: int, stored: Tensors | None = None
) -> list[Tensor]:
    """Returns the table of the network's tensors, with names without a leading "model.".

    Args:
      c: the configuration of the network.
      family: of the target, which names the tensors of the decoder layer.
      names: of the layout.
      layers: the number of the target's layers.
      stored: the tensors in the files, which may spell those of the family in another way.
    """
    block = names.name("block", layers, 0)
    inner = {
        _OWN + name.removeprefix(block): tensor
        for name, tensor in (stored or {}).items()
        if name.startswith(block)
    }
    rows = []
    for row in rows_of(family, c.layers, inner):
        if row.path[0] == "layer_0":
            name = block + row.name.removeprefix(_OWN)
            rows.append(
                dataclasses.replace(row, name=name, path=("network", "layers_0", *row.path[1:]))
            )
    project = names.name("project", layers, 0).removesuffix(".weight")
    rows += dense_rows(project, ("network", "project"))
    norms = ("embedding_norm", "hidden_norm", *["norm"] * c.has_norm)
    for part in norms:
        rows.append(Tensor(names.name(part, layers, 0), ("network", part, "weight")))
    return rows


def network_shapes(c: MtpConfig) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Returns the shape of each parameter of the network."""
    return dict(_traced(c))


@functools.lru_cache(maxsize=8)
def _traced(c: MtpConfig) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
    """Traces the shapes, which takes a fraction of a second."""
    flat = cast(dict[tuple[str, ...], jax.Array], flatten_dict(mtp_shapes(c)))
    return tuple((("network", *path), leaf.shape) for path, leaf in flat.items())
