"""The kinds of drafters that `train.drafter` trains: the methods that have a learner."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import cast

from specjax.methods import METHODS
from specjax.models import TransformerConfig
from specjax.training.drafters.learner import Learner
from specjax.training.drafters.sizes import Sizes

KINDS = tuple(sorted(name for name, method in METHODS.items() if method.learner))
"""The names of the methods that `plan` knows."""


def plan(kind: str, options: Sizes, target: TransformerConfig, mask_token: int) -> Learner:
    """Returns the learner of one of `KINDS` for a target.

    Sizes that the options leave open are chosen by the kind and the target.  `mask_token` is the id
    in place of a token that is not known yet.

    Raises:
      ValueError: a layer that the target does not have, or sizes that do not fit together.
    """
    check_taps(options.taps, target.num_layers)
    method = METHODS[kind]
    assert method.learner is not None
    module, name = method.learner.split(":")
    made = getattr(importlib.import_module(module), name)
    taps = options.taps or default_taps(kind, target.num_layers)
    return cast(Learner, made(options, target, taps, mask_token))


def default_taps(kind: str, num_layers: int) -> tuple[int, ...]:
    """Returns the layers that a kind reads by default of a target with `num_layers` layers.

    The numbers rise, the last layer is among them, and none occurs twice.
    """
    count = min(METHODS[kind].num_taps, num_layers)
    if count == 1:
        return (num_layers,)
    first = min(2, num_layers - count + 1)
    return tuple(first + round(i * (num_layers - first) / (count - 1)) for i in range(count))


def check_taps(taps: Iterable[int], num_layers: int) -> None:
    """Raises ValueError for a layer that a target with `num_layers` layers lacks."""
    for tap in taps:
        if not 0 <= tap <= num_layers:
            raise ValueError(
                f"--taps names {tap}, and the target has {num_layers} layers: 0 is the embedding, "
                f"and {num_layers} the output of the last layer"
            )
