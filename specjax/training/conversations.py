"""Conversations as training data: token ids, and a mask of the assistant's tokens.

Only tokens that the target itself would generate are learned: in each assistant turn, the tokens
after the generation prompt, up to and including the EOS.  To find where a turn begins and where it
ends, the conversation up to that point is rendered with the target's own template, and its token
ids are compared with those of the whole conversation.

Some templates write an earlier turn differently once later turns follow; Qwen3's leaves out what
the model thought.  Such a conversation becomes a row for each assistant turn, rendered up to that
turn, because that is what the target reads when it answers.  A template is refused if even then a
turn does not begin with its generation prompt, since the mask could be wrong.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

import numpy as np

from specjax.arguments import shown
from specjax.models import LanguageModel
from specjax.prompts import text_ids
from specjax.text import Messages, render
from specjax.training.rows import column_of, read_rows

Row = tuple[np.ndarray, np.ndarray]
"""Token ids [L], and a mask [L] bool of those that are learned."""

_ROLES = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names of the roles."""


def read_conversations(
    target: LanguageModel, path: pathlib.Path, column: str | None = None
) -> list[Row]:
    """The conversations of a file of rows.

    A conversation is a list of turns {"role": "user", "content": "..."}, or as ShareGPT has it,
    {"from": "human", "value": "..."}.

    Args:
      target: renders and tokenises them.
      path: the file.
      column: the column that holds them; None: as `rows.column_of` finds it.

    Raises:
      ValueError: a row is wrong; the message gives its number and the reason.
    """
    rows, name = [], None
    for where, fields in read_rows(path):
        try:
            name = name or column_of(path, fields, column)
            rows += encode_conversation(target, fields.get(name))
        except ValueError as error:
            raise ValueError(f"{path}, {where}: {error}") from None
    if not rows:
        raise ValueError(f"{path} holds no conversation")
    return rows


def encode_conversation(target: LanguageModel, messages: object) -> list[Row]:
    """The token ids of a conversation in the target's template, and the assistant's among them.

    Returns:
      One row, or a row for each assistant turn if the template rewrites earlier turns.

    Raises:
      ValueError: it has no assistant turn, or the tokens do not show where a turn begins or ends.
    """
    assert target.tokenizer is not None
    if not isinstance(messages, list) or not all(isinstance(turn, dict) for turn in messages):
        raise ValueError(
            f"messages is {shown(messages)}; it must be a list of turns like "
            '{"role": "user", "content": "..."}'
        )
    turns = [_turn(message) for message in messages]
    answers = [i for i, turn in enumerate(turns) if turn.get("role") == "assistant"]
    if not answers:
        raise ValueError(
            "no message has the role assistant, so there is nothing to learn: "
            "let the target answer with train.generate --prompts"
        )
    whole = _encode(target, turns, False)
    begins = [_encode(target, turns[:i], True) if i else [] for i in answers]
    ends = [_encode(target, turns[: i + 1], False) for i in answers]
    parts = list(zip(begins, ends, strict=True))
    if all(part == whole[: len(part)] for pair in parts for part in pair):
        return [_masked(target, whole, parts)]
    rows = []
    for i, begin, end in zip(answers, begins, ends, strict=True):
        if begin != end[: len(begin)] or len(begin) == len(end):
            raise ValueError(
                f"where message {i} begins cannot be told from the tokens: the template writes the "
                "messages before it differently when it follows; let the target answer with "
                "train.generate --prompts instead"
            )
        rows.append(_masked(target, end, [(begin, end)]))
    return rows


def _turn(message: Mapping[str, object]) -> Mapping[str, object]:
    """A turn with a role and a content."""
    if "role" in message or "from" not in message:
        return message
    role = message["from"]
    return {"role": _ROLES.get(str(role), role), "content": message.get("value")}


def _masked(target: LanguageModel, ids: list[int], parts: list[tuple[list[int], list[int]]]) -> Row:
    """A row in which the tokens between the lengths of each pair of `parts` are learned."""
    learned = np.zeros(len(ids), bool)
    for begin, end in parts:
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
