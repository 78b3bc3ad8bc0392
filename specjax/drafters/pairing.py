"""A proposer and its weights for a target: a draft speaks the same tokens, or its own, which are translated."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from specjax.contract import Proposer, Source
from specjax.drafters.bank import MedusaAdapter, MedusaBank, resolve
from specjax.models import LanguageModel
from specjax.parallel import beside, mesh_of
from specjax.proposers import Chain, DraftSource, NoProposer, TranslatedParams, TranslatedSource
from specjax.text import Translation, translate, vocabulary_digest

_LEAST_SHARED = 0.01
_CURE = "use a draft of the same family, or proposer=NGram()"


def pair(
    target: LanguageModel,
    draft: LanguageModel | None,
    proposer: Proposer | MedusaAdapter | MedusaBank | None,
    num_drafts: int | Sequence[int] = 4,
    adapter: str | Sequence[str | None] | None = None,
    rows: int = 1,
) -> tuple[Proposer, Any]:
    """The proposer to use, and `Params.proposer` for it.

    A draft alone guesses a chain of `num_drafts` tokens (of several numbers, the most).  Where the tokenizers differ,
    the tables between them are made once and kept, and a warning says what they hold.  `adapter` chooses from a bank of
    Medusa heads, for `rows` prompts.  What does not lie on the mesh of the target yet is copied onto each device.

    Raises:
      ValueError: a draft whose tokens cannot be translated, or fewer than 1 % of them; a proposer that asks no draft
        beside one, or was made from other models; a draft on another mesh.
    """
    mesh = mesh_of(target.params)
    if draft is not None and mesh_of(draft.params) not in (None, mesh):
        raise ValueError(
            f"the draft {draft.name!r} lies on another mesh than {target.name!r}: load both with the same mesh="
        )
    proposer, weights = _choose(target, draft, proposer, num_drafts, adapter, rows)
    return proposer, beside(weights, mesh)


def _choose(
    target: LanguageModel,
    draft: LanguageModel | None,
    proposer: Proposer | MedusaAdapter | MedusaBank | None,
    num_drafts: int | Sequence[int],
    adapter: str | Sequence[str | None] | None,
    rows: int,
) -> tuple[Proposer, Any]:
    if isinstance(proposer, MedusaAdapter | MedusaBank):
        if draft is not None:
            raise ValueError("Medusa heads ask no draft: pass either draft= or proposer=, not both")
        return resolve(proposer, adapter, target, rows)
    if adapter is not None:
        raise ValueError(f"adapter={adapter!r} chooses from a bank: pass a MedusaBank as proposer= too")
    if draft is None:
        proposer = proposer or NoProposer()
        return proposer, proposer.bind(target, None)
    if proposer is not None and not proposer.asks_draft:
        raise ValueError(f"a {type(proposer).__name__} asks no draft: pass either draft= or proposer=, not both")
    if proposer is not None and _tables(_Words.of(target), _Words.of(draft)) is None:
        return proposer, proposer.bind(target, draft)
    given = np.ravel(num_drafts).tolist()
    most = max([1, *given]) if np.ndim(num_drafts) else given[0]
    source, weights = source_of(target, draft)
    if proposer is None:
        return Chain(source, most), weights
    raise ValueError(
        f"a {type(proposer).__name__} needs a draft with the tokens of {target.name!r}, and {draft.name!r} has "
        "others: pass draft= alone, which translates"
    )


def source_of(target: LanguageModel, draft: LanguageModel) -> tuple[Source, Any]:
    """What any shape arranges: the draft itself, or with its tokens translated; and its parameters."""
    tables = _tables(_Words.of(target), _Words.of(draft))
    size = target.model.vocab_size
    if tables is None:
        return DraftSource(draft.model, size), draft.params
    translation, expansion = tables
    return TranslatedSource(draft.model, size, expansion), TranslatedParams(draft.params, translation)


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
def _tables(target: _Words, draft: _Words) -> tuple[Translation, int] | None:
    """The tables and their expansion; None where equal ids mean equal tokens (padded sizes may differ)."""
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
        stacklevel=5,
    )
    return jax.tree.map(jnp.asarray, tables), tables.expansion
