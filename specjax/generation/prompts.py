"""Prompts as token ids, from texts, lists of ids, conversations, or files of them."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax._internal.checks import (
    items,
    listed,
    number,
    reworded,
    settle,
    shown,
    tokens_of,
    whole,
)
from specjax.contract import Proposer
from specjax.models import LanguageModel
from specjax.processors import word_list
from specjax.text import no_panic, render
from specjax.types import ABSENT

if TYPE_CHECKING:
    from specjax.generation.request import Prompts

_JSON_LINES = (".jsonl", ".json", ".ndjson")
_FEWEST, _MOST = 16, 2**20
"""Tokens of a row's documents, which are padded to a power of two: few shapes are compiled."""

_SHORTEST = 16

Conversation = list[Mapping[str, object]]
"""Turns like {"role": "user", "content": "..."}."""


def read_text(path: pathlib.Path) -> str:
    """Returns the text of a file, without the mark that some editors put before UTF-8.

    Raises:
      ValueError: the file is not UTF-8.
      OSError: the file does not exist or cannot be read.
    """
    with reworded(f"{path} is not UTF-8 text (", "); save it as UTF-8"):
        return path.read_text(encoding="utf-8-sig")


def read_lines(path: pathlib.Path) -> list[tuple[int, str]]:
    """Returns the lines of a text file that are not blank, with their numbers from 1.

    Only a newline ends a line: JSON texts may hold other characters that separate lines.

    Raises:
      ValueError, OSError: as `read_text`.
    """
    lines = enumerate(read_text(path).split("\n"), start=1)
    return [(number, line) for number, line in lines if line.strip()]


def read_file(path: pathlib.Path) -> list[str | Conversation]:
    """Returns the prompts of a file.

    Raises:
      ValueError, OSError: as `read_records`.
    """
    return [prompt for prompt, _ in read_records(path)]


def read_records(path: pathlib.Path) -> list[tuple[str | Conversation, dict[str, Any]]]:
    """Returns the prompts of a file, each with the other fields of its line.

    A `.jsonl`, `.ndjson` or `.json` file has one JSON object per line, with a text `prompt` or a
    conversation `messages`.  Any other file is one prompt.

    Raises:
      ValueError: the file is not UTF-8, has no prompt, or a line has neither field.
      OSError: the file does not exist or cannot be read.
    """
    if not path.exists():
        raise FileNotFoundError(f"the prompt file {path} does not exist")
    if path.is_dir():
        raise IsADirectoryError(f"the prompt file {path} is a folder; pass a file")
    if path.suffix not in _JSON_LINES:
        text = read_text(path)
        if not text:
            raise ValueError(f"{path} is empty; a prompt needs at least one character")
        return [(text, {})]
    records: list[tuple[str | Conversation, dict[str, Any]]] = []
    for line_number, line in read_lines(path):
        try:
            fields = json.loads(line)
            name = "messages" if "messages" in fields else "prompt"
            prompt = fields[name]
            if not isinstance(prompt, list if name == "messages" else str):
                raise TypeError(f"it holds {shown(prompt)}")
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{path}, line {line_number}: it must be an object like "
                f'{{"prompt": "..."}} or {{"messages": [...]}} ({error!r})'
            ) from None
        records.append((prompt, {key: value for key, value in fields.items() if key != name}))
    if not records:
        raise ValueError(f"{path} holds no prompt")
    return records


def encode_file(target: LanguageModel, path: pathlib.Path) -> list[list[int]]:
    """Returns the token ids of each prompt and conversation of a file.

    Raises:
      ValueError, OSError: as `read_file`, `encode` and `conversations`.
    """
    return [
        ids
        for prompt in read_file(path)
        for ids in (
            encode(target, [prompt])
            if isinstance(prompt, str)
            else conversations(target, None, [prompt])
        )
    ]


def encode(target: LanguageModel, prompts: Prompts, called: str = "prompt") -> list[list[int]]:
    """Returns the token ids of each prompt; errors call a text by the name `called`.

    Raises:
      ValueError: an empty prompt, ids outside the vocabulary, or a text without a tokenizer.
    """
    kinds = "a text, a list of texts, or a list of lists of token ids"
    rows = [prompts] if isinstance(prompts, str) else listed(f"{called}s", prompts, kinds)
    if not rows:
        raise ValueError("prompts is empty; pass at least one prompt, or messages=")
    encoded = []
    for index, row in enumerate(rows):
        if isinstance(row, str):
            if target.tokenizer is None:
                raise ValueError(
                    f"{target.name} has no tokenizer.json; "
                    f"pass token ids in {called}s instead of text"
                )
            row = text_ids(f"{called} {index}", target, row, special=True) if row else []
        tokens = items(row)
        if tokens is None:
            raise ValueError(f"{called}s holds {shown(row)}; pass {kinds}")
        if not tokens:
            raise ValueError(f"{called} {index} is empty; a {called} needs at least one token")
        ids = list[int]()
        if set(map(type, tokens)) == {int}:  # mostly, and quicker than one by one
            ids, tokens = tokens, []
        for token in tokens:
            value = number(token)
            if not isinstance(value, int):
                raise ValueError(
                    f"{called} {index} holds {shown(token)}; token ids are whole numbers: pass "
                    f"{kinds}"
                )
            ids.append(value)
        if not 0 <= min(ids) <= max(ids) < target.model.vocab_size:
            raise ValueError(
                f"{called} {index} holds token ids from {shown(min(ids))} to {shown(max(ids))}; "
                f"the vocabulary of {target.name} has {target.model.vocab_size}"
            )
        encoded.append(ids)
    return encoded


def padded_length(longest: int) -> int:
    """Returns the width of an array for prompts up to `longest`: 16, 24, 32, 48, 64, 96, ...

    Prompts of similar lengths share a program, and less than a third of what the target reads is
    padding.
    """
    width = _SHORTEST
    while width < longest:
        width = width * 3 // 2 if width & (width - 1) == 0 else width * 4 // 3
    return width


def documents_of(
    target: LanguageModel,
    documents: object,
    rows: int,
    proposer: Proposer,
    expected: object = None,
) -> np.ndarray | None:
    """Returns the documents of each row [B, X] int32, as in `Block.documents`; X is a power of two.

    Args:
      target: the model whose tokenizer is used.
      documents: one list of documents for all rows, a list of such lists, or None.
      rows: B.
      proposer: the one that will look up in them.
      expected: the new tokens that are expected of each row, which become its last document, or
        None.

    Raises:
      ValueError: the proposer does not use documents, one of them is neither a text nor a list of
        token ids, or the lists are not one for each row.
    """
    if documents is None and expected is None:
        return None
    if not proposer.reads_documents:
        name, cure = "documents", "pass proposer=NGram(), or a datastore's drafter"
        if documents is None:
            name, cure = "expected", "leave proposer= out, or pass proposer=Aligned()"
        raise ValueError(f"{name}= is not used by a {type(proposer).__name__}: {cure}")
    each = [[]] * rows if documents is None else _documents(target, documents, rows)
    texts = [None] * rows if expected is None else expected_of(target, expected, rows)
    width, made = _FEWEST, []
    for entries, last in zip(each, texts, strict=True):
        tokens = [ABSENT]
        with reworded("documents: "):
            encoded = encode(target, entries, "document") if entries else []
        for ids in [*encoded, *([] if expected is None else [last or []])]:
            tokens += [*ids, ABSENT]
        if len(tokens) > _MOST:
            raise ValueError(
                f"the documents of a prompt have {len(tokens)} tokens, and may have {_MOST}: build "
                "a specjax.Datastore of them"
            )
        made.append(tokens)
        while width < len(tokens):
            width *= 2
    return np.array([[ABSENT] * (width - len(tokens)) + tokens for tokens in made], np.int32)


def _documents(target: LanguageModel, documents: object, rows: int) -> list[Any]:
    """Returns the list of documents of each row."""
    given = listed("documents", documents, "a list of texts or token-id lists")
    nested = [None if isinstance(entry, str) else items(entry) for entry in given]
    is_each = bool(given) and all(
        entry is not None and all(isinstance(x, str) or items(x) is not None for x in entry)
        for entry in nested
    )
    if is_each and len(given) != rows:
        raise ValueError(
            f"documents has {len(given)} lists for {rows} prompts; pass one list of documents, or "
            "one per prompt"
        )
    return [entry or [] for entry in nested] if is_each else [given] * rows


def expected_of(target: LanguageModel, expected: object, rows: int) -> list[list[int] | None]:
    """Returns the tokens that are expected of each row."""
    kinds = "a list with a list of token ids, or None, for each prompt"
    given = listed("expected", expected, kinds)
    if len(given) != rows:
        raise ValueError(f"expected has {len(given)} entries for {rows} prompts; pass {kinds}")
    if any(isinstance(entry, str) for entry in given):
        text = next(entry for entry in given if isinstance(entry, str))
        raise ValueError(
            f"expected holds the text {shown(text)}; pass {kinds}: a tokenizer may cut a text in "
            "other places than the model did"
        )
    with reworded("expected: "):
        return [
            None if entry is None or items(entry) == [] else encode(target, [entry], "text")[0]
            for entry in given
        ]


def text_ids(name: str, target: LanguageModel, text: str, special: bool) -> list[int]:
    """Returns the tokens of a text; with `special` also the tokenizer's special ones, such as BOS.

    Raises:
      ValueError: the text cannot be encoded; for example half of a surrogate pair has no bytes.
    """
    assert target.tokenizer is not None
    what = f"{name} is the text {shown(text)}"
    kinds = (TypeError, UnicodeError)
    with reworded(f"{what}, which cannot be encoded (", "); correct it", kinds), no_panic(what):
        return target.tokenizer.encode(text, add_special_tokens=special).ids


def conversations(
    target: LanguageModel,
    prompts: Prompts | None,
    messages: object,
    more: Mapping[str, Any] | None = None,
) -> list[list[int]]:
    """Returns the token ids of each conversation; `more` are variables for the chat template.

    The template writes the special tokens itself, so the tokenizer adds none.
    """
    if prompts is not None:
        raise ValueError("pass either prompts or messages=, not both")
    turns = items(messages)
    if not turns:
        raise ValueError(
            f"messages={shown(messages)}; pass a list of at least one turn, like "
            '[{"role": "user", "content": "..."}], or a list of such lists'
        )
    if target.tokenizer is None:
        raise ValueError(f"messages= needs a tokenizer, and {target.name} has none")
    chats = [turns] if turns and isinstance(turns[0], Mapping) else turns
    with reworded(f"{target.name}: "):
        texts = [render(target.files, chat, **(more or {})) for chat in chats]
    ids = [text_ids("messages", target, text, special=False) for text in texts]
    if [] in ids:
        raise ValueError(
            f"conversation {ids.index([])} of messages= is rendered to a text without tokens by "
            f"the chat template of {target.name}; give it a turn with some text"
        )
    return ids


def ends_of(target: LanguageModel, eos: object, rows: int) -> list[list[int]]:
    """Returns the token ids that end each row."""
    if eos is None:
        return [list(target.eos)] * rows
    entries = items(eos)
    entries = [eos] if entries is None else entries
    nested = [items(entry) for entry in entries]
    ends = nested if entries and None not in nested else [entries] * rows
    if len(ends) != rows:
        raise ValueError(
            f"eos has {len(ends)} lists for {rows} prompts; pass one list of ids, or one per prompt"
        )
    last = target.model.vocab_size - 1
    wanted = f"a token id, or a list of them; the vocabulary of {target.name} has 0 to {last}"
    return [[whole("eos", token, 0, last, wanted) for token in row or ()] for row in ends]


def bad_word_ids(
    target: LanguageModel, words: object, ends: list[list[int]]
) -> list[Sequence[int]]:
    """Returns the banned token sequences; a text is banned as it is and with a space before it."""
    banned: list[Sequence[int]] = []
    for word in word_list(words):
        if not isinstance(word, str):
            banned.append(tokens_of("bad_words", word, target.model.vocab_size))
            continue
        settle(
            (
                target.tokenizer is None,
                f"bad_words holds {word!r}, but {target.name} has no tokenizer; pass "
                "token-id lists",
            ),
            (
                not word.strip(),
                f"bad_words holds the empty text {word!r}; remove it, or pass token ids",
            ),
        )
        for text in (word, " " + word):
            banned.append(text_ids("bad_words", target, text, special=False))
    for word in banned:
        if len(word) == 1 and any(word[0] in row for row in ends):
            raise ValueError(
                f"bad_words bans {word[0]}, which ends a text; "
                "pass min_new_tokens, or eos=[] for texts without an end"
            )
    return banned
