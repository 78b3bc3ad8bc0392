"""What a family of checkpoints says of itself: how its configuration reads, and what its tensors are called."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from specjax.models.transformer import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a Hugging Face file, and where it goes."""

    name: str
    path: tuple[str, ...]  # in the parameters
    transpose: bool = False  # theirs is [out, in], ours [in, out]


@dataclasses.dataclass(frozen=True)
class Family:
    """A row of the table `specjax.models.FAMILIES`."""

    architecture: str  # the class that transformers would load
    read_config: Callable[[dict[str, Any]], TransformerConfig]  # raises ValueError for a switch that we lack
    write_config: Callable[[TransformerConfig], dict[str, Any]]
    tensors: Callable[[TransformerConfig], list[Tensor]]
    ignored: tuple[str, ...] = ()  # endings of tensor names that hold nothing to learn
