"""Tensors that hold several matrices of a layer, one after the other, and renamed tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from specjax.models.families.family import Tensor


def renamed(rows: list[Tensor], names: Mapping[str, str]) -> list[Tensor]:
    """Returns a table in which parts of the tensors' names are replaced, in the given order."""
    changed = []
    for row in rows:
        name = row.name
        for there, here in names.items():
            name = name.replace(there, here)
        changed.append(dataclasses.replace(row, name=name))
    return changed


def divided(
    name: str, path: tuple[str, ...], sizes: Mapping[str, int], width: int, bias: bool = False
) -> list[Tensor]:
    """Returns the rows of a `torch.nn.Linear` that holds several matrices.

    Args:
      name: of the module.
      path: of the matrices in the parameters, without their names.
      sizes: the outputs of each matrix by its name, in the tensor's order.
      width: the inputs of each matrix.
      bias: the module has one.
    """
    rows, end, every = [], 0, sum(sizes.values())
    for part, size in sizes.items():
        index = (slice(end, end + size),)
        kernel, end = (*path, part, "kernel"), end + size
        rows.append(Tensor(f"{name}.weight", kernel, True, shape=(every, width), index=index))
        if bias:
            rows.append(Tensor(f"{name}.bias", (*path, part, "bias"), shape=(every,), index=index))
    return rows


def convolution(
    name: str, path: tuple[str, ...], sizes: Mapping[str, int], length: int, bias: bool = False
) -> list[Tensor]:
    """Returns the rows of a `torch.nn.Conv1d` of single channels, cut as by `divided`.

    The parameters are called conv_NAME and conv_NAME_bias, and `length` is that of the kernel.
    """
    rows, end, every = [], 0, sum(sizes.values())
    for part, size in sizes.items():
        own, index, end = (*path, f"conv_{part}"), (slice(end, end + size),), end + size
        shape, view = (every, 1, length), (every, length)
        rows.append(Tensor(f"{name}.weight", own, True, shape=shape, view=view, index=index))
        if bias:
            own = (*path, f"conv_{part}_bias")
            rows.append(Tensor(f"{name}.bias", own, shape=(every,), index=index))
    return rows


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
