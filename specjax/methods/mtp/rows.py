"""The table of the tensors of MTP layers, by which they are read and written."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import cast

import jax
from flax.traverse_util import flatten_dict

from specjax.files import rows_of
from specjax.methods.mtp.network import MtpConfig, mtp_shapes
from specjax.methods.mtp.several import part_name
from specjax.methods.published import Tensors, dense_rows
from specjax.models import Family, MtpNames, Tensor

_OWN = "model.layers.0."

_FAMILYS = re.compile(r"^\w+\.layers\.0\.")
"""The beginning of the names of a family's first layer."""


def network_rows(
    c: MtpConfig,
    family: Family,
    names: MtpNames,
    layers: int,
    stored: Tensors | None = None,
    count: int = 1,
) -> list[Tensor]:
    """Returns the table of the tensors of all layers, with names without a leading "model.".

    Args:
      c: the configuration of the network.
      family: of the target, which names the tensors of the decoder layer.
      names: of the layout.
      layers: the number of the target's layers.
      stored: the tensors in the files, which may spell those of the family in another way.
      count: the number of MTP layers, which have the same form.
    """
    return [
        row
        for k in range(count)
        for row in _rows(c, family, names, layers, stored, k, _path(k, count))
    ]


def _path(k: int, count: int) -> tuple[str, ...]:
    """Returns where the parameters of layer k are."""
    return ("network",) if count == 1 else ("network", part_name(k))


def _rows(
    c: MtpConfig,
    family: Family,
    names: MtpNames,
    layers: int,
    stored: Tensors | None,
    k: int,
    path: tuple[str, ...],
) -> list[Tensor]:
    """Returns the table of layer k, whose parameters are at `path`."""
    block = names.name("block", layers, k)
    inner = {
        _OWN + name.removeprefix(block): tensor
        for name, tensor in (stored or {}).items()
        if name.startswith(block)
    }
    rows = []
    for row in rows_of(family, c.layers, inner):
        if row.path[0] == "layer_0":
            is_mlp = names.mlp_block is not None and row.path[1].startswith("mlp")
            stem = names.name("mlp_block", layers, k) if is_mlp else block
            name = _FAMILYS.sub(stem, row.name, count=1)
            rows.append(
                dataclasses.replace(row, name=name, path=(*path, "layers_0", *row.path[1:]))
            )
    project = names.name("project", layers, k).removesuffix(".weight")
    rows += dense_rows(project, (*path, "project"))
    norms = ("embedding_norm", "hidden_norm", *["norm"] * c.has_norm)
    for part in norms:
        rows.append(Tensor(names.name(part, layers, k), (*path, part, "weight")))
    return rows


def network_shapes(c: MtpConfig, count: int = 1) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Returns the shape of each parameter of `count` layers."""
    return {(*_path(k, count), *path): shape for k in range(count) for path, shape in _traced(c)}


@functools.lru_cache(maxsize=8)
def _traced(c: MtpConfig) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
    """Traces the shapes, which takes a fraction of a second."""
    flat = cast(dict[tuple[str, ...], jax.Array], flatten_dict(mtp_shapes(c)))
    return tuple((path, leaf.shape) for path, leaf in flat.items())
