"""Makes drafters by their name on the command line, or by `module:Name` for one of your own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from specjax._internal.checks import settle, shown
from specjax._internal.own_code import named, working_directory
from specjax.contract import Proposer
from specjax.drafters.adapting import automatic
from specjax.drafters.arranging import arrange
from specjax.drafters.folder import mtp_of
from specjax.methods import PROPOSERS, BoundDrafter, Drafter, EarlyExit, first_of, make_drafter
from specjax.models import LanguageModel
from specjax.proposers import Chain, DynamicTree, Forced, NGram, NoProposer, StaticTree

SHAPES = {"draft": Chain, "universal": Chain, "tree": StaticTree, "dynamic-tree": DynamicTree}
"""The shapes of the proposers that need a draft model, by name."""

SELF = {"self-int8": "int8", "self-int4": "int4"}
"""The proposers whose draft is the target itself, with the dtype of the draft's weights."""

NUMBERS: Mapping[str, tuple[str, ...]] = {
    "auto": ("num_drafts",),
    "none": (),
    "draft": ("num_drafts", "confidence_threshold"),
    "universal": ("num_drafts", "confidence_threshold"),
    "tree": ("branching",),
    "dynamic-tree": ("num_drafts", "width", "num_nodes"),
    "early-exit": ("exit_layer", "num_drafts", "confidence_threshold"),
    "first-of": ("num_drafts", "confidence_threshold"),
    "ngram": ("num_drafts", "max_ngram", "min_ngram"),
    "forced": ("num_drafts",),
    "self-int8": ("num_drafts", "confidence_threshold"),
    "self-int4": ("num_drafts", "confidence_threshold"),
    "mtp": ("num_drafts",),
    "medusa": (),
    "datastore": (),
}
"""The names of the settings that each proposer takes."""


_LOADED = {
    "medusa": "specjax.load_medusa(folder, target)",
    "datastore": "specjax.load_datastore(folder).drafter(target)",
}
"""The loaders of the drafters whose weights no other argument of `generate` has."""


def drafter_by_name(
    name: str,
    target: LanguageModel,
    draft: LanguageModel | None = None,
    dtype: str | None = None,
    **numbers: Any,
) -> Drafter:
    """Makes a proposer with its weights, by name.

    Args:
      name: a key of `PROPOSERS`, "auto", "mtp", a key of `SELF`, or "module:Name".
      target, draft: loaded models.
      dtype: "int8" or "int4" rounds the weights of the draft.
      **numbers: settings of the proposer, as in `NUMBERS`; other settings are ignored.

    Raises:
      ValueError: an unknown name, a draft that is missing or not needed, a `dtype` that has no
        effect, or a failed import.
    """
    if dtype is not None and name not in (*SHAPES, "first-of", "auto"):
        cure = "pass specjax.quantise(draft)" if ":" in name else "leave it out"
        raise ValueError(
            f"dtype={dtype!r} quantises the draft of {', '.join(SHAPES)}, first-of and auto, and "
            f"proposer={name!r} is none of them: {cure}"
        )
    if ":" in name:
        return own_drafter(name, target, draft)
    asks_draft = name in SHAPES or name == "first-of"
    known = ", ".join(["auto", *sorted({*PROPOSERS, "mtp"}), *SELF])
    settle(
        (
            name not in ("auto", "mtp", *SELF, *PROPOSERS),
            f"proposer={name!r} is not a proposer; pass one of {known}, or module:Name for one "
            "of your own",
        ),
        (
            name in _LOADED,
            f"proposer={name!r} comes without its weights: pass drafter={_LOADED.get(name)}",
        ),
        (asks_draft and draft is None, f"proposer={name!r} needs a draft model: pass draft= too"),
        (
            draft is not None and not (asks_draft or name == "auto"),
            f"proposer={name!r} uses no draft model: pass either draft= or proposer=, not both",
        ),
    )
    if name in SELF:
        return make_drafter(target, target, dtype=SELF[name], **_settings(name, numbers))
    if name == "mtp":
        return arrange(mtp_of(target), **_settings(name, numbers))
    if name == "auto":
        return automatic(target, draft, dtype, **_settings(name, numbers))
    settings = _settings(name, numbers)
    if name in SHAPES:
        assert draft is not None
        if name == "dynamic-tree" and "num_drafts" in settings:
            depth = settings["depth"] = settings.pop("num_drafts")
            # A tree of one level has fewer candidates than a dynamic tree proposes by default.
            width = settings.get("width", DynamicTree.width)
            candidates = 1 + width + (depth - 1) * width**2
            settings.setdefault("num_nodes", min(DynamicTree.num_nodes, candidates))
        return make_drafter(target, draft, SHAPES[name], dtype=dtype, **settings)
    if name == "first-of":
        assert draft is not None
        chain = make_drafter(target, draft, Chain, dtype=dtype, **settings)
        return first_of(NGram(chain.proposer.max_depth), chain)
    if name == "early-exit":
        layers = target.model.num_taps - 2  # the others are the embedding and the last state
        layer = settings.pop("exit_layer", None)
        if layer is None:
            layer = max(layers // 2, 1)
        return BoundDrafter(EarlyExit(target.model, layer, **settings))
    if name == "forced":
        return BoundDrafter(Forced(**settings))
    return BoundDrafter(NGram(**settings) if name == "ngram" else NoProposer())


def own_drafter(name: str, target: LanguageModel, draft: LanguageModel | None) -> Drafter:
    """Returns the drafter that "module:Name" names.

    `Name` is a `Proposer`, a `Drafter`, or a function `(target, draft)` that makes one.  Modules
    are also searched in the working directory.

    Raises:
      ValueError: no such module, no such name in it, or an object of another kind.
    """
    with working_directory():
        made = named(name, "proposer=")
        if inspect.isclass(made):
            made = made()
        elif inspect.isfunction(made):
            made = made(target, draft)
    if isinstance(made, Drafter):
        return made
    if isinstance(made, Proposer):
        return BoundDrafter(made, draft=draft if made.asks_draft else None)
    raise ValueError(
        f"proposer={name!r} is {shown(made)}; it must be a specjax.contract.Proposer, a "
        "specjax.Drafter, or a function (target, draft) that returns one"
    )


def _settings(name: str, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of `numbers` that are not None and that the proposer `name` takes."""
    return {
        key: value for key, value in numbers.items() if key in NUMBERS[name] and value is not None
    }
