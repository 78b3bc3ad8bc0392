"""What a call of `generate` asks for, read and checked on the host before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specjax.models import LanguageModel
from specjax.text import render

Prompts = str | Sequence[str] | Sequence[Sequence[int]]


def encode(target: LanguageModel, prompts: Prompts) -> list[list[int]]:
    """Token ids of each prompt.  Raises ValueError for an empty one, or for ids outside the vocabulary."""
    rows: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
    if not rows:
        raise ValueError("prompts is empty; pass at least one prompt, or messages=")
    encoded = []
    for index, row in enumerate(rows):
        if not isinstance(row, str | Sequence | np.ndarray):
            raise ValueError(f"prompts holds {row!r}; pass a text, a list of texts, or a list of lists of token ids")
        if isinstance(row, str):
            if target.tokenizer is None:
                raise ValueError(f"{target.name} has no tokenizer.json; pass token ids instead of text")
            row = target.tokenizer.encode(row).ids if row else []
        row = [int(token) for token in row]
        if not row:
            raise ValueError(f"prompt {index} is empty; a prompt needs at least one token")
        if not 0 <= min(row) <= max(row) < target.model.vocab_size:
            raise ValueError(
                f"prompt {index} holds token ids from {min(row)} to {max(row)}; "
                f"the vocabulary of {target.name} has {target.model.vocab_size}"
            )
        encoded.append(row)
    return encoded


def conversations(target: LanguageModel, prompts: Prompts | None, messages: Any) -> list[list[int]]:
    """The token ids of each conversation.  The template writes special tokens itself, so none are added."""
    if prompts is not None:
        raise ValueError("pass either prompts or messages=, not both")
    if target.tokenizer is None:
        raise ValueError(f"messages= needs a tokenizer, and {target.name} has none")
    chats = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
    try:
        texts = [render(target.files, chat) for chat in chats]
    except ValueError as error:
        raise ValueError(f"{target.name}: {error}") from None
    return [target.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def ends_of(target: LanguageModel, eos: Any, rows: int) -> list[list[int]]:
    """The token ids that end each row."""
    single = not isinstance(eos, Sequence) and np.ndim(eos) == 0  # NumPy knows no rows of several lengths
    eos = list(target.eos) if eos is None else [eos] if single else list(eos)
    ends = [list(row) for row in eos] if eos and np.ndim(eos[0]) else [eos] * rows
    if len(ends) != rows:
        raise ValueError(f"eos has {len(ends)} lists for {rows} prompts; pass one list of ids, or one a prompt")
    for token in (token for row in ends for token in row):
        if not 0 <= token < target.model.vocab_size:
            raise ValueError(f"eos={token}; the vocabulary of {target.name} has 0 to {target.model.vocab_size - 1}")
    return ends


def bad_word_ids(target: LanguageModel, words: Any, ends: list[list[int]]) -> list[Sequence[int]]:
    """Token sequences: a text's own, and those that it has after a space."""
    if isinstance(words, str):
        raise ValueError(f"bad_words={words!r} is a text; pass a list of texts or of token-id lists")
    found: list[Sequence[int]] = []
    for word in words:
        if not isinstance(word, str):
            found.append(word)
            continue
        if target.tokenizer is None:
            raise ValueError(f"bad_words holds {word!r}, but {target.name} has no tokenizer; pass token-id lists")
        if not word.strip():
            raise ValueError(f"bad_words holds the empty text {word!r}; remove it, or pass token ids")
        for text in (word, " " + word):
            found.append(target.tokenizer.encode(text, add_special_tokens=False).ids)
    for word in found:
        if len(word) == 1 and any(word[0] in row for row in ends):
            raise ValueError(
                f"bad_words bans {word[0]}, which ends a text; pass min_new_tokens, or eos=[] for texts without an end"
            )
    return found


def check_length(target: LanguageModel, draft: LanguageModel | None, ids: list[list[int]], new: int) -> None:
    for model in (target, draft):
        if model is None:
            continue
        most, longest = model.model.max_positions, max(map(len, ids))
        if longest + new > most:
            raise ValueError(
                f"a prompt of {longest} tokens and max_new_tokens={new} make {longest + new}, but {model.name} reads "
                f"at most {most}: shorten the prompt, or pass max_new_tokens={max(most - longest, 0)} or less"
            )


def drafts_of(num_drafts: int | Sequence[int], rows: int) -> np.ndarray | None:
    """How deep each row may guess; None: as deep as its proposer does."""
    if np.ndim(num_drafts) == 0:
        return None
    found = np.asarray(num_drafts)
    if len(found) != rows:
        raise ValueError(f"num_drafts has {len(found)} values for {rows} prompts; pass one, or one a prompt")
    for value in found:
        if value != int(value) or value < 0:
            raise ValueError(f"num_drafts={value} is not allowed; it must be a whole number, 0 (plain) or greater")
    return found.astype(np.int32)


def seeds_of(seed: int | Sequence[int], rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The seed of each row, and what tells apart rows of one seed for all."""
    single = np.ndim(seed) == 0
    seeds = [int(s) for s in np.reshape(np.asarray(seed, object), -1)]
    if not single and len(seeds) != rows:
        raise ValueError(f"seed has {len(seeds)} values for {rows} prompts; pass one, or one a prompt")
    for value in seeds:
        if not 0 <= value < 2**32:
            raise ValueError(f"seed={value} is not allowed; it must lie in [0, 2^32)")
    index = np.arange(rows, dtype=np.int32)
    return np.array(seeds * rows if single else seeds, np.uint32), index if single else np.zeros_like(index)


def pad_rows(rows: Any, padding: int) -> Any:
    """A tree of arrays, each with its last row so many times more."""
    if padding == 0:
        return rows
    return jax.tree.map(lambda x: x[np.minimum(np.arange(len(x) + padding), len(x) - 1)], rows)
