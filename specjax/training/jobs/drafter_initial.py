"""Loads the drafter that `train.drafter --initial` continues to train."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.contract import Arrays
from specjax.drafters import load_drafter
from specjax.methods import PublishedDrafter
from specjax.models import LanguageModel
from specjax.parallel import TRAINING_RULES
from specjax.training.drafters import Learner
from specjax.training.jobs.drafter_options import DrafterOptions


def initial_params(
    options: DrafterOptions, target: LanguageModel, mine: Learner, to_draft: np.ndarray | None
) -> Arrays:
    """Returns the parameters of the folder `--initial` in float32.

    Args:
      options: of the run.
      target: the model that it is trained for.
      mine: the drafter that the options describe.
      to_draft: [V] the drafter's id of each token, or -1; None if it knows all tokens.

    Raises:
      ValueError: the folder holds a drafter of another kind, shape or vocabulary.
    """
    folder = options.initial
    assert folder is not None
    loaded = load_drafter(folder, target, rules=TRAINING_RULES)
    if not isinstance(loaded, PublishedDrafter) or type(loaded.source) is not type(mine.source):
        raise ValueError(
            f"--initial {folder} is not a drafter of --kind {options.kind}: pass another "
            "folder, or its kind"
        )
    faults = _differences(loaded.source, mine.source)
    if faults:
        raise ValueError(
            f"--initial {folder} has another shape than these options describe:\n  "
            + "\n  ".join(faults)
        )
    if ("head" in loaded.shares) == mine.own_head:
        raise ValueError(
            f"--initial {folder} has "
            + ("no output matrix" if mine.own_head else "an output matrix")
            + " of its own: pass --"
            + ("no-" if mine.own_head else "")
            + "own-head"
        )
    own = dict(loaded.params)
    theirs = own.pop("to_draft", None)
    if (theirs is None) != (to_draft is None) or not np.array_equal(
        np.arange(0) if theirs is None else theirs,
        np.arange(0) if to_draft is None else to_draft,
    ):
        size = "all tokens" if theirs is None else f"{(np.asarray(theirs) >= 0).sum()} tokens"
        raise ValueError(
            f"--initial {folder} knows {size}, and --draft-vocab-size "
            f"{options.draft_vocab_size} of this --data are others: pass the number and "
            "the data that it was trained with"
        )
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), own)


def _differences(theirs: object, mine: object, name: str = "") -> list[str]:
    """Returns a line for each field in which two configurations differ."""
    if type(theirs) is type(mine) and dataclasses.is_dataclass(mine):
        return [
            line
            for field in dataclasses.fields(mine)
            if field.compare
            for line in _differences(
                vars(theirs)[field.name], vars(mine)[field.name], f"{name}.{field.name}"
            )
        ]
    return [] if theirs == mine else [f"{name[1:]}: {theirs} in the folder, {mine} by the options"]
