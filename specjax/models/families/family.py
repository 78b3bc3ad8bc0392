"""What a family of checkpoints says of itself: how its configuration reads, and what its tensors are called."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from specjax.models.config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a Hugging Face file, or a part of one, and where it goes.

    What is read is `stored.reshape(view)[index]`, in the shape of the parameter (the shape of `parameter[at]` where
    `at` is given, of its transpose where `transpose` is set); what is written is the reverse.  Several rows may name
    the same tensor: together they cover it.
    """

    name: str
    path: tuple[str, ...]  # in the parameters
    transpose: bool = False  # theirs is [out, in], ours [in, out]
    at: int | None = None  # the place of this tensor in a stacked parameter (an expert)
    shape: tuple[int, ...] | None = None  # of the stored tensor, where it is not the parameter's
    view: tuple[int, ...] | None = None  # by default `shape`
    index: tuple[slice | int, ...] = ()  # into the view


@dataclasses.dataclass(frozen=True)
class Family:
    """A row of the table `specjax.models.FAMILIES`."""

    architecture: str  # the class that transformers would load
    read_config: Callable[
        [dict[str, Any]], TransformerConfig
    ]  # raises ValueError for a switch that we lack
    write_config: Callable[[TransformerConfig], dict[str, Any]]
    tensors: Callable[[TransformerConfig], list[Tensor]]
    ignored: tuple[str, ...] = ()  # endings of tensor names that hold nothing to learn
    prefix: str = ""  # of the names above, which older files leave out
