"""Conversations as training data: token ids, and which of them the assistant says.

Only what the target itself is to say when it serves is learned: of every assistant's turn the tokens behind the opened
turn, up to the token that ends it.  Where a turn begins and ends is found by writing the conversation up to there with
the target's own template and comparing token ids; a template that writes an earlier turn differently later on, or whose
boundary falls inside a token, is refused, since a mask would be a guess there.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np

from specjax.models import LanguageModel
from specjax.text import render

Row = tuple[np.ndarray, np.ndarray]
"""Token ids [L], and of each whether it is learned, [L] bool."""

SUFFIX = ".jsonl"


def read_conversations(target: LanguageModel, path: pathlib.Path) -> list[Row]:
    """The conversations of a file, a line each: {"messages": [{"role": "user", "content": "..."}, ...]}.

    Raises:
      ValueError: the line, and what is wrong with it.
    """
    found = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            if not isinstance(fields, dict) or "messages" not in fields:
                raise ValueError(
                    'it must be an object like {"messages": [{"role": "user", "content": "..."}, ...]}'
                )
            found.append(encode_conversation(target, fields["messages"]))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not found:
        raise ValueError(f"{path} holds no conversation")
    return found


def encode_conversation(target: LanguageModel, messages: Any) -> Row:
    """The token ids of a conversation as the target's template writes it, and which of them the assistant says.

    Raises:
      ValueError: nobody answers in it, or the template has no place where an answer certainly begins or ends.
    """
    assert target.tokenizer is not None
    turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if not turns:
        raise ValueError(
            "no message has the role assistant, so there is nothing to learn: answer with train.generate"
        )
    ids = _encode(target, messages, False)
    learned = np.zeros(len(ids), bool)
    for i in turns:
        begin, end = (
            _encode(target, messages[:i], True) if i else [],
            _encode(target, messages[: i + 1], False),
        )
        for place, part in (("begins", begin), ("ends", end)):
            if part != ids[: len(part)]:
                raise ValueError(
                    f"where message {i} {place} cannot be told from the tokens: the template writes what stands before "
                    "it differently without what follows; let the target answer with train.generate --prompts instead"
                )
        said = ids[len(begin) : len(end)]
        # Templates may go on behind the token that ends a turn, and nobody says that.
        last = max(
            (n for n, token in enumerate(said) if token in target.eos), default=len(said) - 1
        )
        learned[len(begin) : len(begin) + last + 1] = True
    return np.array(ids, np.int32), learned


def _encode(target: LanguageModel, messages: Any, opened: bool) -> list[int]:
    assert target.tokenizer is not None
    text = render(target.files, messages, add_generation_prompt=opened)
    return target.tokenizer.encode(text, add_special_tokens=False).ids
