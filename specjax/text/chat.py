"""Renders conversations as text with the Jinja chat template of a tokenizer.

A template is a program from a model's folder.  It runs in Jinja's immutable sandbox, with only the
filters and functions that Hugging Face templates expect, and in a process with limits
(`sandbox.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specjax._internal.checks import items, number, reworded, settle, shown
from specjax._internal.extras import need
from specjax._internal.fields import Kind, parse_object
from specjax.text.confined import LONGEST
from specjax.text.sandbox import ask
from specjax.text.words import SPECIAL_TOKENS

Messages = Sequence[Mapping[str, object]]
"""A conversation: [{"role": "user", "content": "..."}, ...]."""

_MEDIA = tuple(
    f"{before}{kind}{after}"
    for kind in ("image", "video", "audio")
    for before, after in (("", ""), ("", "_url"), ("input_", ""))
)
"""The types of parts of messages that are no text, in the templates of models and of OpenAI."""

_SPECIAL = Kind('a text, or an object with a text "content"', lambda text: isinstance(text, str))


def render(
    files: Mapping[str, bytes],
    messages: Messages,
    /,
    *,
    add_generation_prompt: bool = True,
    **variables: object,
) -> str:
    """Renders the text of a conversation.

    It contains the special tokens, so encode it with `add_special_tokens=False`.

    Args:
      files: the files of the model's folder, by name (`LanguageModel.files`).
      messages: the conversation so far.
      add_generation_prompt: open the assistant's turn.
      variables: further variables of this template, such as `enable_thinking`.

    Raises:
      ValueError: there is no template, it is broken, it refuses these messages, it takes too long
        or too much memory, or the messages hold something else than values of JSON.
    """
    turns = items(messages)
    if not turns or not all(_is_message(turn) for turn in turns):
        raise ValueError(
            f'messages={shown(messages)}; pass a list like [{{"role": "user", "content": "..."}}]'
        )
    for place, turn in enumerate(turns):
        for part in items(turn.get("content")) or ():
            if (fault := unread_part(part)) is not None:
                raise ValueError(f"messages[{place}] {fault}")
    config = _object(files, "tokenizer_config.json")
    source, where = _template(files, config)
    if source is None:
        raise ValueError(
            "there is no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json): pass the whole prompt as text"
        )
    need("jinja2", "chat templates", "chat")
    known = {"tools": None, "documents": None, **_special_tokens(files, config), **variables}
    known |= {"messages": turns, "add_generation_prompt": add_generation_prompt}
    with reworded(
        f"messages={shown(messages)} or a variable of the chat template cannot be written as JSON "
        "(",
        "): pass texts, numbers, booleans, None, lists and dicts of these",
        (TypeError, ValueError, RecursionError),
    ):
        request = json.dumps({"source": source, "variables": known}, default=_plain).encode()
    subject = f"the chat template ({where})"
    cure = "correct the template, or pass the whole prompt as text"
    refusals = {
        "damaged": f"is damaged: {{}}; {cure}",
        "refused": f"refuses these messages: {{}}; change them, {cure}",
        "long": f"writes {{}} characters, and {LONGEST} are allowed: {cure}",
    }
    return ask("templates", subject, cure, request, refusals)["text"]


def _plain(value: object) -> object:
    """Returns a mapping, sequence or number of another library as JSON has it."""
    if isinstance(value, Mapping):
        return dict(value)
    plain = number(value)
    if plain is not None:
        return plain
    listed = items(value)
    if listed is None:
        raise TypeError(f"it holds a {type(value).__name__}")
    return listed


def unread_part(part: Mapping[str, object]) -> str | None:
    """Returns what is said of a part of a message that holds no text; None: it may be one.

    Without this a template would write the placeholder of an image, which is no image.
    """
    kind = part.get("type")
    kind = next((name for name in _MEDIA if name in part), None) if kind is None else kind
    if kind not in _MEDIA:
        return None
    return (
        f"has a part of the type {shown(kind)}: specjax reads text, and of a model that also reads "
        "images or sound it loads only the text model; send parts of the type text"
    )


def _is_message(message: object) -> bool:
    """Returns whether a message has a role, and a text or a list of parts as content."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    if isinstance(content, str | None):
        return True
    return all(isinstance(part, Mapping) for part in items(content) or [None])


def template_of(files: Mapping[str, bytes]) -> str:
    """Returns the source of the chat template in the files of a model's folder; "" without one.

    Raises:
      ValueError: the template is damaged.
    """
    return _template(files, _object(files, "tokenizer_config.json"))[0] or ""


def _template(files: Mapping[str, bytes], config: dict[str, object]) -> tuple[str | None, str]:
    """Returns the source of the chat template, or None if the folder has none, and where it is."""
    if (name := "chat_template.jinja") in files:
        with reworded(f"{name} is not UTF-8 text (", "); save it as UTF-8"):
            return files[name].decode(), name
    template, where = config.get("chat_template"), "chat_template in tokenizer_config.json"
    if isinstance(template, str | None):
        return template, where
    entries = template if isinstance(template, list) else [None]
    by_name = {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
    }
    settle(
        (
            len(by_name) < len(entries),
            f"{where} is {shown(template)}; it must be a text, or a list of objects with a name "
            "and a template, each once",
        ),
        (
            "default" not in by_name,
            f"{where} has the templates {shown(list(by_name))}, and none is the default: keep one "
            "of them",
        ),
    )
    return by_name["default"], where


def _special_tokens(files: Mapping[str, bytes], config: dict[str, Any]) -> dict[str, str]:
    """Returns {"bos_token": text, ...}; tokenizer_config.json overrides special_tokens_map.json."""
    special = {}
    for source, tokens in (
        ("special_tokens_map.json", _object(files, "special_tokens_map.json")),
        ("tokenizer_config.json", config),
    ):
        for name in SPECIAL_TOKENS:
            token = tokens.get(name)
            if token is None:
                continue
            text = token.get("content") if isinstance(token, dict) else token
            special[name] = _SPECIAL.of(f"{name} in {source}", text)
    return special


def _object(files: Mapping[str, bytes], name: str) -> dict[str, object]:
    """Returns the JSON object in the file `name`; {} if there is no such file."""
    return parse_object(files.get(name, b"{}"), name)
