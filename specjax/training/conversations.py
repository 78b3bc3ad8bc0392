"""Conversations as training data: token ids, and a mask of the assistant's tokens.

Only tokens that the target itself would generate are learned: in each assistant turn, the tokens
after the generation prompt, up to and including the EOS.  To find where a turn begins and where it
ends, the conversation up to that point is rendered with the target's own template, and its token
ids are compared with those of the whole conversation.  A template is refused if it renders an
earlier turn differently once later turns follow, or if a turn ends inside a token, since the mask
could be wrong.
"""

from __future__ import annotations

import json
import pathlib

import numpy as np

from specjax.arguments import shown
from specjax.models import LanguageModel
from specjax.prompts import read_lines, text_ids
from specjax.text import Messages, render

Row = tuple[np.ndarray, np.ndarray]
"""Token ids [L], and a mask [L] bool of those that are learned."""

SUFFIX = ".jsonl"


def read_conversations(target: LanguageModel, path: pathlib.Path) -> list[Row]:
    """The conversations of a file with one JSON object per line.

    A line is {"messages": [{"role": "user", "content": "..."}, ...]}.

    Raises:
      ValueError: a line is wrong; the message gives its number and the reason.
    """
    rows = []
    for number, line in read_lines(path):
        try:
            fields = json.loads(line)
            if not isinstance(fields, dict) or "messages" not in fields:
                raise ValueError(
                    "it must be an object like "
                    '{"messages": [{"role": "user", "content": "..."}, ...]}'
                )
            rows.append(encode_conversation(target, fields["messages"]))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not rows:
        raise ValueError(f"{path} holds no conversation")
    return rows


def encode_conversation(target: LanguageModel, messages: Messages) -> Row:
    """The token ids of a conversation in the target's template, and the assistant's among them.

    Raises:
      ValueError: it has no assistant turn, or the tokens do not show where a turn begins or ends.
    """
    assert target.tokenizer is not None
    if not isinstance(messages, list) or not all(isinstance(turn, dict) for turn in messages):
        raise ValueError(
            f"messages is {shown(messages)}; it must be a list of turns like "
            '{"role": "user", "content": "..."}'
        )
    turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if not turns:
        raise ValueError(
            "no message has the role assistant, so there is nothing to learn: "
            "let the target answer with train.generate --prompts"
        )
    ids = _encode(target, messages, False)
    learned = np.zeros(len(ids), bool)
    for i in turns:
        begin, end = (
            _encode(target, messages[:i], True) if i else [],
            _encode(target, messages[: i + 1], False),
        )
        for boundary, part in (("begins", begin), ("ends", end)):
            if part != ids[: len(part)]:
                raise ValueError(
                    f"where message {i} {boundary} cannot be told from the tokens: the template "
                    "writes earlier messages differently when later ones are missing; let the "
                    "target answer with train.generate --prompts instead"
                )
        turn = ids[len(begin) : len(end)]
        # Templates may add tokens after the EOS of a turn, which the target never generates.
        last = max(
            (n for n, token in enumerate(turn) if token in target.eos), default=len(turn) - 1
        )
        learned[len(begin) : len(begin) + last + 1] = True
    return np.array(ids, np.int32), learned


def _encode(target: LanguageModel, messages: Messages, opened: bool) -> list[int]:
    text = render(target.files, messages, add_generation_prompt=opened)
    return text_ids("the conversation", target, text, special=False)
