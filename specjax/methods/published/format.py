"""`Format`: the declaration of how to recognise, describe, read and write folders of drafters."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping

import numpy as np

from specjax.files import Stored
from specjax.methods.drafter import Drafter
from specjax.methods.published.drafter import PublishedDrafter
from specjax.models import Config, LanguageModel, Tensor
from specjax.parallel import Rules
from specjax.types import Weights

Tensors = dict[str, Stored]
"""The tensors of a folder by name, from the headers of its files; no weight has been read."""


def folder_of(tensors: Tensors) -> pathlib.Path:
    """Returns the folder that the tensors are in."""
    return next(iter(tensors.values())).file.parent


@dataclasses.dataclass(frozen=True)
class Description:
    """The description of a drafter's folder, from only its configuration and headers."""

    method: str  # such as "EAGLE-3"
    packaging: str  # whose layout of the configuration and of the names
    # Layers of the target that it reads: 0 is the embedding, i the output of layer i.  None: the
    # folder names none, and the default depends on the target.
    taps: tuple[int, ...] | None
    num_drafts: int  # the depth of its drafts, as the folder or the method has it
    shares: tuple[str, ...]  # of the target's "embedding" and "head": those that it uses
    details: tuple[str, ...] = ()  # further lines
    tensors: tuple[str, ...] | None = None  # its own, in a folder with others; None: all


@dataclasses.dataclass(frozen=True)
class Export:
    """The contents of a drafter's folder that is to be written."""

    config: Config  # of config.json
    rows: list[Tensor]  # of the file, in the same table that reading uses
    shapes: dict[tuple[str, ...], tuple[int, ...]]  # of each parameter that the rows name
    params: Weights  # of the drafter, and of the target what the layout repeats
    tables: dict[str, np.ndarray]  # of a reduced vocabulary


@dataclasses.dataclass(frozen=True)
class Layout:
    """The declaration of how a project writes drafters of a format."""

    # What it cannot hold of a drafter for this target, in words that go on "the drafter ...".
    faults: Callable[[PublishedDrafter, LanguageModel], list[str]]
    export: Callable[[PublishedDrafter, LanguageModel], Export]  # of a drafter without faults


@dataclasses.dataclass(frozen=True)
class Format:
    """The declaration of how folders of one method are recognised, described, read and written."""

    # By the tensors, also where any one of them is missing, so that reading can name it.  The
    # configuration only decides where the tensors leave it open.
    matches: Callable[[Config, Tensors], bool]
    # Raises ValueError with everything that does not fit the configuration or the target.  The
    # parameters are split over the target's mesh by the rules.
    read: Callable[[pathlib.Path, Config, Tensors, LanguageModel, Rules], Drafter]
    # The target is None, or a model whose parameters need not be there.
    describe: Callable[[Config, Tensors, LanguageModel | None], Description]
    # Is this drafter one of the format?
    makes: Callable[[Drafter], bool]
    # By the name that `save_drafter` takes, the usual one first.
    layouts: Mapping[str, Layout]
