"""Tensors that hold several matrices of a layer, one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from specjax.models.families.family import Tensor


def fused(
    rows: list[Tensor], layer: int, name: str, sizes: Mapping[str, int], width: int
) -> list[Tensor]:
    """Returns a table in which one tensor holds several matrices of a layer.

    Args:
      rows: the table with a tensor for each matrix.
      layer: counted from 0.
      name: of the tensor, after that of the layer.
      sizes: the outputs of each matrix by its name in the parameters, in the tensor's order.
      width: the inputs of each matrix.
    """
    slices, end = {}, 0
    for part, size in sizes.items():
        slices[part] = slice(end, end + size)
        end += size
    name = f"model.layers.{layer}.{name}.weight"

    def is_part(path: tuple[str, ...]) -> bool:
        return path[0] == f"layer_{layer}" and path[-1] == "kernel" and path[-2] in slices

    return [
        dataclasses.replace(row, name=name, shape=(end, width), index=(slices[row.path[-2]],))
        if is_part(row.path)
        else row
        for row in rows
    ]
