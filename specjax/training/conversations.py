"""Conversations as training data: token ids, and a mask of the assistant's tokens.

Only tokens that the target itself would generate are learned: in each assistant turn, the tokens
after the generation prompt, up to and including the EOS.  To find where a turn begins and where it
ends, the conversation up to that point is rendered with the target's own template, and its token
ids are compared with those of the whole conversation.  No conversation precedes a first answer, and
templates do not render empty ones, so the generation prompt of a question is looked for in the text
of that answer.

Some templates render an earlier turn differently once later turns follow; Qwen3's leaves out the
model's reasoning.  Such a conversation becomes a row for each assistant turn, rendered up to that
turn, because that is what the target reads when it answers.  A template is refused if even then a
turn does not begin with its generation prompt, since the mask could be wrong.

An answer with `"weight": 0`, as OpenAI's files of fine-tuning have it, is read and not learned.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Mapping

import numpy as np

from specjax import text
from specjax._internal.checks import reworded, settle, shown
from specjax.models import LanguageModel
from specjax.training.rows import column_of, parsed, read_rows

Row = tuple[np.ndarray, np.ndarray]
"""Token ids [L], and a mask [L] bool of the learned tokens."""

_ROLES = {"human": "user", "gpt": "assistant"}
"""The role for each of ShareGPT's names."""

_SAYS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""The fields that a turn without content may have."""


def read_conversations(
    target: LanguageModel, path: pathlib.Path, column: str | None = None
) -> list[Row]:
    """Returns the conversations of a file of rows.

    A conversation is a list of turns {"role": "user", "content": "..."}, or as ShareGPT has it,
    {"from": "human", "value": "..."}.  The list may be a JSON text.  The template is also given the
    tools in the column "tools", if there are any.

    Without a `column` it is the one that `rows.column_of` finds.
    """
    rows, name = [], None
    for where, fields in read_rows(path):
        with reworded(f"{path}, {where}: "):
            name = name or column_of(path, fields, column)
            rows += encode_conversation(target, fields.get(name), fields.get("tools"))
    if not rows:
        raise ValueError(f"{path} holds no conversation")
    return rows


def encode_conversation(target: LanguageModel, messages: object, tools: object = None) -> list[Row]:
    """Returns the token ids of a conversation in the target's template, and the learned ones.

    These are one row, or a row for each assistant turn if the template rewrites earlier turns.

    Args:
      target: renders and tokenises it.
      messages: its turns, or their JSON text.  "weight": 0 leaves an answer out.
      tools: descriptions of functions for the template, or their JSON text; None: there are none.

    Raises:
      ValueError: the conversation has no assistant turn to learn, a turn is wrong, or the tokens do
        not show where a turn begins or ends.
    """
    assert target.tokenizer is not None
    turns, learned = _read_turns(parsed(messages))
    template = functools.partial(text.render, target.files, tools=_read_tools(parsed(tools)))

    def ids(rendered: str) -> list[int]:
        from specjax import generation

        return generation.text_ids("the conversation", target, rendered, special=False)

    whole = ids(template(turns, add_generation_prompt=False))
    begins = [ids(template(turns[:i]) if i else _opening(template, turns[0])) for i in learned]
    ends = [ids(template(turns[: i + 1], add_generation_prompt=False)) for i in learned]
    parts = list(zip(begins, ends, strict=True))
    if all(part == whole[: len(part)] for pair in parts for part in pair):
        return [_masked(target, whole, parts)]
    rows = []
    for i, begin, end in zip(learned, begins, ends, strict=True):
        if begin != end[: len(begin)] or len(begin) == len(end):
            raise _uncertain(i)
        rows.append(_masked(target, end, [(begin, end)]))
    return rows


def _uncertain(number: int) -> ValueError:
    return ValueError(
        f"where message {number} begins cannot be told from the tokens: the template writes the "
        'text before it differently when it follows; give it "weight": 0, which leaves it out, or '
        "let the target answer with train.generate --prompts instead"
    )


def _opening(template: Callable[..., str], answer: Mapping[str, object]) -> str:
    """Returns the text before the content of a first answer, up to its generation prompt."""
    question = [{"role": "user", "content": "?"}]
    opened, closed = template(question), template(question, add_generation_prompt=False)
    pairs = enumerate(zip(opened, closed, strict=False))
    same = next((n for n, (a, b) in pairs if a != b), min(len(opened), len(closed)))
    prompt = opened[same:]
    if not prompt:  # the template does not open answers, and the target writes all of a turn
        return ""
    before, found, _ = template([answer], add_generation_prompt=False).partition(prompt)
    if not found:
        raise _uncertain(0)
    return before + found


def _read_turns(messages: object) -> tuple[list[dict[str, object]], list[int]]:
    """Returns the turns as templates read them, and the numbers of those that are learned."""
    if not isinstance(messages, list) or not all(isinstance(turn, dict) for turn in messages):
        raise ValueError(
            f"messages is {shown(messages)}; it must be a list of turns like "
            '{"role": "user", "content": "..."}, or the JSON text of such a list'
        )
    read = [_read_turn(number, message) for number, message in enumerate(messages)]
    turns = [turn for turn, _ in read]
    learned = [number for number, (_, is_learned) in enumerate(read) if is_learned]
    answers = any(turn.get("role") == "assistant" for turn in turns)
    settle(
        (
            answers and not learned,
            "every answer has weight 0, so there is nothing to learn: remove this conversation",
        ),
        (
            not answers,
            "no message has the role assistant, so there is nothing to learn: let the target "
            "answer with train.generate --prompts",
        ),
    )
    return turns, learned


def _read_turn(number: int, message: Mapping[str, object]) -> tuple[dict[str, object], bool]:
    """Returns a turn as templates read it, and whether it is learned."""
    # Many files have a null for each field that a turn does not have.
    turn = {name: value for name, value in message.items() if value is not None}
    if "role" not in turn and "from" in turn:
        name = str(turn.pop("from"))
        turn["role"] = _ROLES.get(name, name)
        turn["content"] = turn.pop("value", turn.get("content"))
    weight, role = turn.pop("weight", None), turn.get("role")
    settle(
        (
            weight not in (None, 0, 1),
            f"message {number} has weight {shown(weight)}; a weight is 0, which leaves an answer "
            "out, or 1",
        ),
        (
            weight == 1 and role != "assistant",
            f"message {number} has weight 1 and the role {shown(role)}, and only answers are "
            "learned: leave this weight out",
        ),
        (
            turn.get("content") is None and not any(turn.get(name) for name in _SAYS),
            f"message {number} has no content and no tool_calls; its fields are "
            f"{', '.join(message)}: give it a content, which may be an empty text",
        ),
    )
    turn.setdefault("content", None)
    return turn, role == "assistant" and weight != 0


def _read_tools(tools: object) -> object:
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(
            f"tools is {shown(tools)}; it must be a list of objects like "
            '{"type": "function", "function": {...}}, or the JSON text of such a list; '
            "give the column another name if it holds something else"
        )
    return tools


def _masked(target: LanguageModel, ids: list[int], parts: list[tuple[list[int], list[int]]]) -> Row:
    """Returns a row in which the tokens between the lengths of each pair of `parts` are learned."""
    learned = np.zeros(len(ids), bool)
    for begin, end in parts:
        turn = ids[len(begin) : len(end)]
        # Templates may add tokens after the EOS of a turn, which the target never generates.
        last = max(
            (n for n, token in enumerate(turn) if token in target.eos), default=len(turn) - 1
        )
        learned[len(begin) : len(begin) + last + 1] = True
    learned[:1] = False  # nothing stands before the first token, from which it could be predicted
    return np.array(ids, np.int32), learned
