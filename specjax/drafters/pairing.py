"""A proposer and its weights for a target: a draft speaks the same tokens, or its own, which are translated."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import tokenizers
from jax.sharding import Mesh

from specjax.arguments import hashable, shown
from specjax.drafters.bank import MedusaAdapter, MedusaBank, resolve
from specjax.files import quantise, quantised_form
from specjax.models import LanguageModel
from specjax.parallel import beside, mesh_of
from specjax.proposers import Drafter, DraftModel, EarlyExit, FirstOf, Medusa, NoProposer, Universal, UniversalParams
from specjax.text import Translation, translate, vocabulary_digest
from specjax.types import Proposer

Weights = Callable[[LanguageModel], Any]
"""Makes `Params.proposer`, given the target as it lies on its devices."""

_PARTS = ("num_nodes", "max_depth", "is_chain", "init", "propose", "observe")  # of `types.Proposer`
_LEAST_SHARED = 0.01
_CURE = "use a draft of the same family, or proposer=NGram()"


def pair(
    target: LanguageModel,
    draft: LanguageModel | None,
    proposer: Proposer | MedusaAdapter | MedusaBank | None,
    num_drafts: int = 4,
    adapter: str | Sequence[str | None] | None = None,
    rows: int = 1,
) -> tuple[Proposer, Any]:
    """The proposer of `choose`, and `Params.proposer`, copied onto the mesh of the target if need be."""
    mesh = mesh_of(target.params)
    proposer, weights = choose(target, draft, proposer, num_drafts, adapter, rows, mesh=mesh)
    return proposer, beside(weights(target), mesh)


def choose(
    target: LanguageModel,
    draft: LanguageModel | None,
    proposer: Proposer | MedusaAdapter | MedusaBank | str | None,
    num_drafts: int = 4,
    adapter: str | Sequence[str | None] | None = None,
    rows: int = 1,
    *,
    draft_dtype: str | None = None,
    mesh: Mesh | None = None,
) -> tuple[Proposer, Weights]:
    """The proposer to use, and what makes its weights from the target as it will lie.

    The weights come later because they may compile.  Nothing compiles here.

    Args:
      target, draft: as loaded.
      proposer: one, Medusa heads with their weights, a `FirstOf` of these, "self-int8", or None.
      num_drafts: a draft alone guesses a chain of so many tokens; 0 is plain decoding, whatever
        the proposer.
      adapter: chooses from a bank of Medusa heads.
      rows: prompts.
      draft_dtype: "int8" quantises the draft.
      mesh: on which all will lie.

    Where the tokenizers differ, the tables between them are made once and kept, and a warning says
    what they hold.

    Raises:
      ValueError: what is no proposer; a draft whose tokens cannot be translated, or fewer than 1 %
        of them; a proposer that asks no draft beside one, or was made from other models; a draft on
        another mesh.
    """
    if draft is not None and mesh_of(draft.params) not in (None, mesh):
        raise ValueError(
            f"the draft {draft.name!r} lies on another mesh than {target.name!r}: load both with the same mesh="
        )
    beside_it = f"with draft={draft and draft.name}"
    if draft_dtype is not None and (draft is None or not (isinstance(draft_dtype, str) and draft_dtype == "int8")):
        raise ValueError(f'draft_dtype={shown(draft_dtype)} {beside_it}; it takes "int8" and a draft')
    asked, given = draft, draft
    if isinstance(proposer, str):
        if proposer != "self-int8" or draft is not None:
            raise ValueError(
                f"proposer={proposer!r} {beside_it}; pass a proposer such as NGram(), or "
                '"self-int8", which takes no draft'
            )
        asked, proposer = quantised_form(target), None
    elif draft is not None and draft_dtype:
        asked = quantised_form(draft)

    def arrays(laid: LanguageModel) -> Any:
        model = laid if given is None else given
        return (model if given is asked else quantise(model)).params

    _check(proposer)
    if adapter is not None and not _holds(proposer, MedusaAdapter | MedusaBank):
        raise ValueError(f"adapter={shown(adapter)} chooses from a bank: pass a MedusaBank as proposer= too")
    made = _choose(target, asked, proposer, max(num_drafts, 1), arrays, adapter, rows)
    return (NoProposer(), _none) if num_drafts == 0 else made


def _choose(
    target: LanguageModel,
    draft: LanguageModel | None,
    proposer: Any,
    num_drafts: int,
    arrays: Weights,
    adapter: Any,
    rows: int,
) -> tuple[Proposer, Weights]:
    """`arrays` makes the draft's."""
    if draft is None:
        return _with_weights(NoProposer() if proposer is None else proposer, target, None, arrays, adapter, rows)
    if proposer is not None and not _holds(proposer, Drafter | Universal):
        raise ValueError(f"a {type(proposer).__name__} asks no draft: pass either draft= or proposer=, not both")
    size = target.model.vocab_size
    words = _Words.of(target), _Words.of(draft)
    found = _tables(*words)
    if found is None:
        proposer = DraftModel(draft.model, size, num_drafts) if proposer is None else proposer
        return _with_weights(proposer, target, draft, arrays, adapter, rows)
    if proposer is not None:
        raise ValueError(
            f"a {type(proposer).__name__} needs a draft with the tokens of {target.name!r}, and {draft.name!r} has "
            "others: pass draft= alone, which translates"
        )
    made = Universal(draft.model, size, num_drafts, found.expansion)
    return made, lambda laid: UniversalParams(arrays(laid), _on_device(*words))


def _check(proposer: Any) -> None:
    """Raises ValueError for what is no proposer."""
    if proposer is None or isinstance(proposer, MedusaAdapter | MedusaBank):
        return
    if isinstance(proposer, type):
        raise ValueError(
            f"proposer={shown(proposer)} is a class; pass one of its objects, such as {proposer.__name__}(...)"
        )
    if isinstance(proposer, FirstOf):  # whose parts may be heads, which are no proposers yet
        _check(proposer.first)
        _check(proposer.second)
        return
    missing = [name for name in _PARTS if not hasattr(proposer, name)]
    if missing:
        raise ValueError(
            f"proposer={shown(proposer)} is no proposer, since it has no {', '.join(missing)}; pass one such as NGram()"
        )
    hashable("proposer", proposer)


def _holds(proposer: Any, kinds: Any) -> bool:
    """Is it, or a part of it, one of these?"""
    if isinstance(proposer, FirstOf):
        return _holds(proposer.first, kinds) or _holds(proposer.second, kinds)
    return isinstance(proposer, kinds)


def _none(laid: LanguageModel) -> None:
    del laid


def _with_weights(
    proposer: Any, target: LanguageModel, draft: LanguageModel | None, arrays: Weights, adapter: Any, rows: int
) -> tuple[Proposer, Weights]:
    """One that was made from `target` and `draft`, with its weights, part by part."""
    name = type(proposer).__name__
    if isinstance(proposer, FirstOf):
        (first, one), (second, two) = (
            _with_weights(part, target, draft, arrays, adapter, rows) for part in (proposer.first, proposer.second)
        )
        return dataclasses.replace(proposer, first=first, second=second), lambda laid: (one(laid), two(laid))
    if isinstance(proposer, MedusaAdapter | MedusaBank):
        return resolve(proposer, adapter, target, rows)
    if isinstance(proposer, Medusa):
        raise ValueError("a Medusa comes without its weights: pass what specjax.load_medusa returns instead")
    if isinstance(proposer, EarlyExit):
        if proposer.target != target.model:
            raise ValueError(f"the {name} was made for another target than {target.name}; pass target.model to it")
        return proposer, lambda laid: laid.params
    if not isinstance(proposer, Drafter | Universal):
        return proposer, _none
    if draft is None or isinstance(proposer, Universal):
        raise ValueError(f"a {name} comes without its weights: pass the loaded model as draft= too")
    if proposer.model != draft.model or proposer.vocab_size != target.model.vocab_size:
        raise ValueError(
            f"the {name} was made for other models than {draft.name} and {target.name}; "
            "make it from draft.model and target.model.vocab_size"
        )
    made: Any = proposer
    return made, arrays


@dataclasses.dataclass(frozen=True)
class _Words:
    """What the tables depend on.  A tokenizer is known again as the object that it is."""

    tokenizer: tokenizers.Tokenizer | None
    size: int  # of the model's vocabulary
    eos: tuple[int, ...]
    name: str

    @classmethod
    def of(cls, model: LanguageModel) -> _Words:
        return cls(model.tokenizer, model.model.vocab_size, model.eos, model.name)

    def __str__(self) -> str:
        count = f"{self.tokenizer.get_vocab_size()} tokens" if self.tokenizer else f"{self.size} ids, no tokenizer"
        return f"{self.name!r} ({count})"  # quoted: many a draft is called "draft"


@functools.lru_cache(maxsize=8)
def _on_device(target: _Words, draft: _Words) -> Translation:
    return jax.tree.map(jnp.asarray, _tables(target, draft))


@functools.lru_cache(maxsize=8)
def _tables(target: _Words, draft: _Words) -> Translation | None:
    """The tables, on the host; None where equal ids mean equal tokens (padded sizes may differ)."""
    ours, theirs = target.tokenizer, draft.tokenizer
    if ours is None or theirs is None:
        if ours is theirs and target.size == draft.size:
            return None
        raise ValueError(
            f"without both tokenizers the draft {draft} cannot be translated for the target {target}; {_CURE}"
        )
    if vocabulary_digest(ours) == vocabulary_digest(theirs):
        return None
    ends = [(end, draft.eos[0]) for end in target.eos if draft.eos]
    try:
        tables = translate(ours, theirs, target.size, draft.size, ends)
    except ValueError as error:
        raise ValueError(f"the draft {draft} speaks other tokens than the target {target}: {error}; {_CURE}") from None
    shared, least = tables.num_shared, math.ceil(_LEAST_SHARED * ours.get_vocab_size())
    if shared < least:
        raise ValueError(
            f"the draft {draft} has {shared} tokens of the target {target}, and fewer than {least} are no use; {_CURE}"
        )
    warnings.warn(
        f"the draft {draft} speaks other tokens than the target {target}: it can propose the {shared} that both have",
        stacklevel=6,
    )
    return tables
