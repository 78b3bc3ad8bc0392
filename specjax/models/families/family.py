"""`Family`: declares the reader of a family's configurations, and its tensor names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import EllipsisType
from typing import Any

from specjax.models.config import TransformerConfig

Config = dict[str, Any]
"""The parsed `config.json` of a Hugging Face folder: JSON values that the readers check."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a Hugging Face file, or a slice of one, and the parameter that it fills.

    Reading takes `stored.reshape(view)[index]` and gives it the shape of the parameter (of
    `parameter[at]` if `at` is given, and with its last two axes exchanged if `transpose` is set).
    Writing is the reverse.  Several rows may name the same stored tensor; together they cover it.
    """

    name: str
    path: tuple[str, ...]  # in the parameters
    transpose: bool = False  # the file has [out, in], the parameter [in, out]
    at: int | None = None  # index of this tensor in a stacked parameter (an expert)
    shape: tuple[int, ...] | None = None  # of the stored tensor, if not the parameter's
    view: tuple[int, ...] | None = None  # by default `shape`
    index: tuple[slice | int | EllipsisType, ...] = ()  # into the view
    wide: bool = False  # the parameter is float32, whatever dtype the model is loaded in


@dataclasses.dataclass(frozen=True)
class Family:
    """A row of the table `specjax.models.FAMILIES`."""

    architecture: str  # the class that transformers would load
    # Raises ValueError for a setting that specjax does not support.
    read_config: Callable[[Config], TransformerConfig]
    write_config: Callable[[TransformerConfig], Config]
    tensors: Callable[[TransformerConfig], list[Tensor]]
    ignored: tuple[str, ...] = ()  # endings of the names of tensors that are not parameters
    # Beginnings of the names of other models' tensors; "{num_layers}" stands for that number.
    skipped: tuple[str, ...] = ()
    fused: bool = False  # files may hold a matrix of every expert of a layer in one tensor
    # The table for files that do so, if the family also has files with a tensor for each expert;
    # the names in the files decide which of the two tables is read.
    fused_tensors: Callable[[TransformerConfig], list[Tensor]] | None = None
    # The table for files whose such matrices are [in, out], if there are some; shapes decide.
    turned_tensors: Callable[[TransformerConfig], list[Tensor]] | None = None
    # Beginning of names in `tensors` -> how files spell it; the first spelling that they have is
    # that of all such names.
    prefixes: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    # Parts of names in `tensors` -> how files may spell them; a spelling counts for each tensor
    # that the files do not have under its own name.
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Parts of the names of tensors that are one matrix, cut by rows; files may cut it elsewhere.
    cut: tuple[str, ...] = ()

    def spelled(self, name: str) -> list[str]:
        """Returns the name of a tensor in every spelling of its beginning."""
        for spellings in self.prefixes.values():
            for prefix in spellings:
                if name.startswith(prefix):
                    return [other + name.removeprefix(prefix) for other in spellings]
        return [name]
