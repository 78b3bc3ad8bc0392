"""Draft models whose output matrix has a part of the vocabulary.

A draft reads its whole output matrix for every token, which is often more than half of its bytes,
and most drafts are among the frequent tokens.  With a part of the matrix the other tokens are never
proposed.  That changes how many drafts are accepted, and never the text.

Reference: Zhao et al. 2025 (FR-Spec), arXiv 2502.14856.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax._internal.checks import shown, typed
from specjax.models import Int8, LanguageModel, LinenModel, Transformer, is_packed
from specjax.text import Words

_MULTIPLE = 128
"""The number of kept tokens is a multiple of it, as the tiles of accelerators are."""


def trim_vocabulary(
    draft: LanguageModel,
    tokens: int | Sequence[int],
    texts: Iterable[str | Sequence[int]] | None = None,
) -> LanguageModel:
    """Returns a draft model that proposes only a part of its tokens, and still reads all.

    The tokens that end a text and those that the tokenizer marks as special are always in the part,
    and it is filled up to a multiple of 128 with the smallest ids.

    Args:
      draft: as `specjax.load` returns it; it is not changed.
      tokens: the ids of the part, or how many there are.  Then they are the most frequent in
        `texts`, or without any the smallest ids: a byte-pair tokenizer numbers its tokens as it
        merged them, the frequent ones first.
      texts: what the target has written or will write, as strings or as tokens of the draft.

    Raises:
      ValueError: tokens that the draft lacks, a part that is no smaller than the vocabulary, or a
        draft that is trimmed already, no specjax Transformer, or whose output matrix is packed.

    Example:
      >>> draft = specjax.load(specjax.shipped("tiny/draft"))
      >>> small = specjax.trim_vocabulary(draft, 256)
      >>> draft.params["head"]["kernel"].shape, small.params["head"]["kernel"].shape
      ((32, 512), (32, 256))
    """
    typed("what specjax.load(folder) returns", LanguageModel, draft=draft)
    network = draft.model
    if not (isinstance(network, LinenModel) and isinstance(network.module, Transformer)):
        raise ValueError(
            f"{draft.name} is a {type(network).__name__}; only a specjax Transformer, as "
            "specjax.load returns, can be trimmed here: a model of your own must leave out rows of "
            "its output matrix itself"
        )
    module = network.module
    if module.head_tokens is not None:
        raise ValueError(
            f"{draft.name} is trimmed already: pass the model that specjax.load returned"
        )
    kept = _kept(draft, tokens, texts)
    size = network.vocab_size
    columns = np.full(size, -1, np.int32)
    columns[kept] = np.arange(len(kept))
    params = {**draft.params, "head": _head(draft, module, kept), "columns": jnp.asarray(columns)}
    module = module.clone(head_tokens=len(kept), separate_head=module.config.tied_embeddings)
    name = f"{draft.name} with {len(kept)} of {size} tokens"
    return dataclasses.replace(
        draft, model=dataclasses.replace(network, module=module), params=params, name=name
    )


def _kept(
    draft: LanguageModel, tokens: int | Sequence[int], texts: Iterable[str | Sequence[int]] | None
) -> np.ndarray:
    """Returns the ids of the part, ascending."""
    size = draft.model.vocab_size
    words = draft.tokenizer
    used = size if words is None else min(size, words.get_vocab_size())
    if isinstance(tokens, int | np.integer) and not isinstance(tokens, bool):
        if not 1 <= tokens < size:
            raise ValueError(
                f"tokens={tokens}; it must be in [1, {size - 1}], since {draft.name} has {size}"
            )
        first = np.arange(used) if texts is None else _frequent(draft, texts)[:used]
        chosen = first[: int(tokens)]
    else:
        chosen = np.asarray(tokens)
        if chosen.ndim != 1 or not chosen.size or not np.issubdtype(chosen.dtype, np.integer):
            raise ValueError(f"tokens={shown(tokens)}; it must be a number or a list of token ids")
        wrong = chosen[(chosen < 0) | (chosen >= size)]
        if wrong.size:
            raise ValueError(
                f"tokens has the id {wrong[0]}, and {draft.name} has the tokens 0 to {size - 1}"
            )
        if texts is not None:
            raise ValueError("texts= counts tokens where tokens= is a number, and it is a list")
    is_special = Words(words).is_special
    must = {number for number in range(size) if number in draft.eos or is_special(number)}
    every = set(chosen.tolist()) | must
    wanted = -(-len(every) // _MULTIPLE) * _MULTIPLE
    if wanted >= size:
        raise ValueError(
            f"tokens={shown(tokens)} keeps {len(every)} tokens with those that end a text and the "
            f"special ones, {wanted} as a multiple of {_MULTIPLE}, and {draft.name} has {size}: "
            "keep fewer, or leave the vocabulary as it is"
        )
    rest = np.setdiff1d(np.arange(size), np.fromiter(every, np.int64))
    return np.sort(np.concatenate([np.fromiter(every, np.int64), rest[: wanted - len(every)]]))


def _frequent(draft: LanguageModel, texts: Iterable[str | Sequence[int]]) -> np.ndarray:
    """Returns all ids, the most frequent in the texts first; the smaller one of two equal ones."""
    size = draft.model.vocab_size
    counts = np.zeros(size, np.int64)
    if isinstance(texts, str):
        raise ValueError("texts= is one string; it must be a list of texts")
    for number, text in enumerate(texts):
        if isinstance(text, str):
            if draft.tokenizer is None:
                raise ValueError(f"{draft.name} has no tokenizer: pass texts= as lists of tokens")
            text = draft.tokenizer.encode(text, add_special_tokens=False).ids
        ids = np.asarray(text, np.int64)
        if ids.size and not (0 <= ids.min() and ids.max() < size):
            raise ValueError(
                f"texts[{number}] has the token {ids.min() if ids.min() < 0 else ids.max()}, and "
                f"{draft.name} has the tokens 0 to {size - 1}"
            )
        counts += np.bincount(ids.reshape(-1), minlength=size)
    return np.argsort(-counts, kind="stable")


def _head(draft: LanguageModel, module: Transformer, kept: np.ndarray) -> dict[str, Any]:
    """Returns the columns `kept` of the output matrix."""
    if "head" not in draft.params:
        rows: Array = draft.params["embedding"][kept]
        return {"weight": rows} if module.transposed else {"kernel": rows.T}
    head = {}
    for name, leaf in draft.params["head"].items():
        if isinstance(leaf, Int8):
            head[name] = Int8(leaf.values[kept], leaf.scale[kept])
        elif is_packed(leaf):
            raise ValueError(
                f"the output matrix of {draft.name} is packed, and its rows are not taken apart: "
                "load it with dequantise=True"
            )
        else:
            head[name] = leaf[:, kept] if name == "kernel" else leaf[kept]
    return head
