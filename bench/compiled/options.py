"""The options of the commands that compile programs for chips that are not there."""

from __future__ import annotations

import dataclasses

import numpy as np

from bench.compiled.drafters import DRAFTERS
from bench.compiled.sizes import DTYPES, SIZES, TARGETS, VOCABULARY
from specjax.options import fields


@dataclasses.dataclass(frozen=True)
class ProgramOptions(fields.Options):
    """What is compiled, and where the report goes."""

    size: tuple[str, ...] = fields.option(("1b",), "targets", choices=sorted(TARGETS))
    target_config: str | None = fields.option(
        None, "a config.json (or its folder) instead of a size"
    )
    layers: tuple[int, ...] = fields.option(
        (),
        "compile only as many first layers of a target, once for each of two numbers, and "
        "extrapolate to all of its layers",
    )
    draft: str | None = fields.option(None, "size of the draft model", choices=sorted(SIZES))
    split_draft: bool = fields.option(
        False, "split the draft model too; default: every chip holds all of it"
    )
    dtype: str = fields.option(
        "bfloat16",
        "of the weights; int8 and packed ones have activations in bfloat16",
        choices=DTYPES,
    )
    vocab_size: int | None = fields.option(
        None, f"of --size; default: that of a published target, otherwise {VOCABULARY}"
    )
    chip: tuple[str, ...] = fields.option((), "kinds of chips")
    chips: tuple[int, ...] = fields.option((1,), "in one mesh")
    drafter: tuple[str, ...] = fields.option(
        ("none", "draft"), "drafters", choices=sorted(DRAFTERS)
    )
    batch: tuple[int, ...] = fields.option((1,), "rows")
    capacity: tuple[int, ...] = fields.option((1024,), "tokens of a row")
    filled: int | None = fields.option(None, "tokens of the longest row; default: the capacity")
    json: str | None = fields.option(None, "write the list of cells to this file")
    plot: str | None = fields.option(None, "draw the bytes of a step to this file")
    keep: str | None = fields.option(None, "write the optimised programs to this folder")


def check(arguments: ProgramOptions) -> None:
    """Raises ValueError for a number that is out of bounds."""
    for name in ("batch", "capacity", "chips", "filled", "vocab_size"):
        given = getattr(arguments, name)
        if given is not None and np.min(given) < 1:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is {np.min(given)}; it must be at least 1")
    if arguments.layers and not (
        len(arguments.layers) == 2 and 1 <= arguments.layers[0] < arguments.layers[1]
    ):
        raise ValueError(
            f"--layers is {[*arguments.layers]}; it must be two numbers of layers, the smaller one "
            "first, of at least 1"
        )
