"""Pairs a draft model with a target.  If their tokenizers differ, tables translate the tokens."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from specjax._internal.checks import chosen, reworded, typed
from specjax.contract import ArrayTree, Proposer, Source
from specjax.methods.draft_model.source import DraftSource
from specjax.methods.draft_model.translated import TranslatedParams, TranslatedSource
from specjax.methods.drafter import BoundDrafter, Drafter
from specjax.models import (
    LanguageModel,
    quantise,
    quantised_form,
    round_activations,
    rounding_form,
)
from specjax.proposers import Chain
from specjax.rounding import in_int4, int4_form
from specjax.text import Translation, translate, vocabulary_digest

_LEAST_SHARED = 0.01
_LIBRARY = "specjax."
DTYPES = ("int8", "int4")
"""The dtypes that the weights of a draft can be rounded to."""

_CURE = "use a draft of the same family, or proposer=NGram()"


@dataclasses.dataclass(frozen=True, eq=False)
class DraftDrafter(Drafter):
    """A shape over a draft model, whose tokens are translated if they differ from the target's."""

    # Makes `Params.proposer` from a target whose parameters are on their devices.
    from_target: Callable[[LanguageModel], ArrayTree] = dataclasses.field(kw_only=True)
    source: Source = dataclasses.field(kw_only=True)
    # None if its tokens are translated: then a text may be longer than the draft can read.
    draft: LanguageModel | None = None

    @property
    def reader(self) -> LanguageModel | None:
        return self.draft

    def make(self, target: LanguageModel, slots: np.ndarray | None) -> ArrayTree:
        del slots
        return self.from_target(target)

    def shaped(self, shape: Callable[..., Proposer], **numbers: object) -> DraftDrafter:
        return dataclasses.replace(self, proposer=shape(self.source, **numbers))


def make_drafter(
    target: LanguageModel,
    draft: LanguageModel,
    shape: Callable[..., Proposer] = Chain,
    *,
    dtype: str | None = None,
    **numbers: object,
) -> Drafter:
    """Makes a drafter: `make_drafter(target, draft, StaticTree, branching=(3, 2))`.

    If the tokenizers differ, the tables between them are made once and cached, and a warning says
    how many tokens are in both vocabularies.  Nothing is compiled yet.

    Args:
      target, draft: as `specjax.load` returns them.
      shape: `Chain`, `StaticTree` or `DynamicTree`.
      dtype: "int8" or "int4" rounds the weights of the draft.
      **numbers: arguments of `shape`.

    Raises:
      ValueError: tokens that cannot be translated, or models that share fewer than 1 % of the
        target's tokens.

    Example:
      >>> target = specjax.load(specjax.shipped("tiny/target"))
      >>> draft = specjax.load(specjax.shipped("tiny/draft"))
      >>> drafter = specjax.make_drafter(target, draft, specjax.StaticTree, branching=(3, 2))
      >>> drafter.proposer.num_nodes  # the root, 3 children and 6 grandchildren
      10
    """
    typed("what specjax.load(folder) returns", LanguageModel, target=target, draft=draft)
    chosen("dtype", dtype, (None, *DTYPES))
    form = _form(draft, dtype)
    size, words = target.model.vocab_size, (_Words.of(target), _Words.of(form))
    tables = _tables(*words)
    if tables is not None:
        _say(words, tables.num_shared)

    def params(laid: LanguageModel) -> ArrayTree:
        # A target that is its own draft is rounded from the parameters that are on its devices.
        return _rounded(laid if draft is target else draft, dtype).params

    if tables is None:
        source: Source = DraftSource(form.model, size)
        return DraftDrafter(
            shape(source, **numbers), name=form.name, from_target=params, source=source, draft=form
        )

    def translated(laid: LanguageModel) -> TranslatedParams:
        return TranslatedParams(params(laid), _on_device(*words))

    source = TranslatedSource(form.model, size, tables.expansion)
    return DraftDrafter(
        shape(source, **numbers), name=form.name, from_target=translated, source=source
    )


def with_draft(
    target: LanguageModel, draft: LanguageModel, proposer: Proposer, dtype: str | None
) -> Drafter:
    """Returns a proposer that was made from `draft.model`, with the weights of `draft`.

    Raises:
      ValueError: the proposer needs no draft, or the draft has other tokens.
    """
    form = _form(draft, dtype)
    name = type(proposer).__name__
    if not proposer.asks_draft:
        raise ValueError(f"a {name} uses no draft model: pass either draft= or proposer=, not both")
    if _tables(_Words.of(target), _Words.of(form)) is not None:
        raise ValueError(
            f"a {name} needs a draft with the tokens of {target.name!r}, but {form.name!r} has "
            "other tokens: pass draft= alone, which translates them, or "
            "drafter=specjax.make_drafter(target, draft, shape)"
        )
    make = None if dtype is None else (lambda laid: _rounded(draft, dtype))
    return BoundDrafter(proposer, name=form.name, draft=form, make_draft=make)


def _form(draft: LanguageModel, dtype: str | None) -> LanguageModel:
    """Returns a draft as it is with weights of this dtype, without rounding them."""
    if dtype == "int8":
        return quantised_form(draft)
    if dtype is None:
        return draft
    form = int4_form(draft)
    return rounding_form(form) if _on_one_cpu(draft) else form


def _rounded(draft: LanguageModel, dtype: str | None) -> LanguageModel:
    if dtype == "int8":
        return quantise(draft)
    if dtype is None:
        return draft
    # Products on a CPU take less time with rounded activations, and no text depends on them.
    made = in_int4(draft)
    return round_activations(made) if _on_one_cpu(draft) else made


def _on_one_cpu(model: LanguageModel) -> bool:
    leaf = jax.tree.leaves(model.params)[0]
    devices = leaf.devices() if isinstance(leaf, jax.Array) else ()
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"


@dataclasses.dataclass(frozen=True)
class _Words:
    """The inputs of the tables, from one model.

    It is the key of their cache; tokenizers compare by identity.
    """

    tokenizer: tokenizers.Tokenizer | None
    size: int  # of the model's vocabulary
    eos: tuple[int, ...]
    name: str

    @classmethod
    def of(cls, model: LanguageModel) -> _Words:
        return cls(model.tokenizer, model.model.vocab_size, model.eos, model.name)

    def __str__(self) -> str:
        count = (
            f"{self.tokenizer.get_vocab_size()} tokens"
            if self.tokenizer
            else f"{self.size} ids, no tokenizer"
        )
        return f"{self.name!r} ({count})"  # quoted, since many folders are called "draft"


@functools.lru_cache(maxsize=8)
def _on_device(target: _Words, draft: _Words) -> Translation:
    return jax.tree.map(jnp.asarray, _tables(target, draft))


@functools.lru_cache(maxsize=8)
def _tables(target: _Words, draft: _Words) -> Translation | None:
    """Returns the tables, on the host; None if equal ids mean equal tokens (sizes may differ)."""
    ours, theirs = target.tokenizer, draft.tokenizer
    if ours is None or theirs is None:
        if ours is theirs and target.size == draft.size:
            return None
        raise ValueError(
            f"without both tokenizers the draft {draft} cannot be translated for the target "
            f"{target}; {_CURE}"
        )
    if vocabulary_digest(ours) == vocabulary_digest(theirs):
        return None
    ends = [(end, draft.eos[0]) for end in target.eos if draft.eos]
    others = f"the draft {draft} uses other tokens than the target {target}"
    with reworded(f"{others}: ", f"; {_CURE}"):
        tables = translate(ours, theirs, target.size, draft.size, ends)
    shared, least = tables.num_shared, math.ceil(_LEAST_SHARED * ours.get_vocab_size())
    if shared < least:
        raise ValueError(
            f"the draft {draft} shares {shared} tokens with the target {target}, but at least "
            f"{least} are needed; {_CURE}"
        )
    return tables


_said: set[str] = set()


def _say(words: tuple[_Words, _Words], shared: int) -> None:
    """Warns once of each pair, at the line outside of this library that combined both models."""
    target, draft = words
    message = (
        f"the draft {draft} uses other tokens than the target {target}: it can propose the "
        f"{shared} that both have"
    )
    if message in _said:
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_LIBRARY):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
    _said.add(message)
