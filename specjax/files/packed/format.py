"""`Format`: how one format of packed weights holds a matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from specjax.files.headers import Stored
from specjax.files.packed.matrix import E4M3, PackedTensor, raw
from specjax.models import Config

FLOATS = ("F32", "BF16", "F16")

Parts = Mapping[str, Stored]
"""The tensors of a matrix, by the ends of their names."""


@dataclasses.dataclass(frozen=True)
class Format:
    """A format.

    Attributes:
      name: for people.
      codes: the end of the name of the tensor with a matrix's codes.
      kinds: of that tensor, as safetensors names dtypes.
      dense: the end of that name in files that are not quantised.
      needed: the ends of the names of the other tensors, as a tuple of spellings for each.
      optional: ends of the names of tensors that a matrix may have.
      open: returns the matrix.  It raises ValueError for tensors that do not fit each other, and
        reads none but the smallest.
    """

    name: str
    codes: str
    kinds: tuple[str, ...]
    dense: str
    needed: tuple[tuple[str, ...], ...]
    optional: tuple[str, ...]
    open: Callable[[Parts, Config], PackedTensor]


def check_shape(part: Stored, what: str, shape: tuple[int, ...], kinds: tuple[str, ...]) -> None:
    """Raises ValueError if a tensor has another shape or dtype; 0-D counts as [1]."""
    if part.kind not in kinds:
        raise ValueError(f"{what} is stored as {part.kind} instead of {' or '.join(kinds)}")
    if (part.shape or (1,)) != shape:
        raise ValueError(f"{what} has shape {list(part.shape)} instead of {list(shape)}")


def finite(part: Stored, what: str) -> np.ndarray:
    """Returns the scales of a matrix.  Raises ValueError if one is NaN or infinite."""
    numbers = raw(part)
    if numbers.dtype == np.uint8:
        bad = numbers == 255  # NaN in e8m0
    elif numbers.dtype == E4M3:
        bad = (numbers.view(np.uint8) & 0x7F) == 0x7F
    else:
        bad = ~np.isfinite(numbers.astype(np.float32))
    if count := int(np.count_nonzero(bad)):
        raise ValueError(f"{what} holds {count} numbers that are NaN or infinite")
    return numbers


def groups_of(inputs: int, groups: int, size: int | None, what: str) -> int:
    """Returns the inputs of a group.

    Args:
      inputs: of the matrix.
      groups: the scales of an output.
      size: what the configuration says, or None or -1.
      what: the name of the scales.

    Raises:
      ValueError: they do not fit.
    """
    if size is None or size < 1:
        size = inputs if groups < 2 else -(-inputs // groups)
    if groups != max(-(-inputs // size), 1):
        raise ValueError(
            f"{what} has {groups} groups, and {inputs} inputs in groups of {size} have "
            f"{-(-inputs // size)}"
        )
    return size


def in_groups(index: Stored | None, inputs: int, group: int) -> np.ndarray | None:
    """Returns the inputs in the order of their groups, for the group of each input in the file.

    The result is None if the inputs stand in that order.

    Raises:
      ValueError: a group has more or fewer inputs than the others.
    """
    if index is None:
        return None
    check_shape(index, "g_idx", (inputs,), ("I32", "I64"))
    of = raw(index).astype(np.int64)
    wanted = np.arange(inputs) // group
    if (of == -1).all() or np.array_equal(of, wanted):
        return None
    order = np.argsort(of, kind="stable").astype(np.int32)
    if not np.array_equal(of[order], wanted):
        raise ValueError(f"g_idx does not put {group} inputs into each group")
    return order


def expanded(scale: np.ndarray, outputs: int) -> np.ndarray:
    """Returns the scales [out, groups] of scales for a whole tensor, of [1] or [1, 1]."""
    return np.broadcast_to(scale.reshape(-1, scale.shape[-1]), (outputs, scale.shape[-1]))
