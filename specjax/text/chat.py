"""Renders conversations as text with the Jinja chat template of a tokenizer.

A template is a program from a model's folder, so it runs in Jinja's immutable sandbox, with only
the filters and functions that Hugging Face templates expect.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from specjax.arguments import items, shown

if TYPE_CHECKING:
    import jinja2
    from jinja2.nodes import Node
    from jinja2.parser import Parser

Messages = Sequence[Mapping[str, object]]
"""One conversation: [{"role": "user", "content": "..."}, ...]."""

_SPECIAL = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def render(
    files: Mapping[str, bytes],
    messages: Messages,
    *,
    add_generation_prompt: bool = True,
    **variables: object,
) -> str:
    """The text of a conversation.

    It contains the special tokens, so encode it with `add_special_tokens=False`.

    Args:
      files: the files of the model's folder, by name (`LanguageModel.files`).
      messages: the conversation so far.
      add_generation_prompt: open the assistant's turn.
      variables: further variables of this template, such as `enable_thinking`.

    Raises:
      ValueError: there is no template, it is broken, or it refuses these messages.
    """
    turns = items(messages)
    if not turns or not all(_is_message(turn) for turn in turns):
        raise ValueError(
            f'messages={shown(messages)}; pass a list like [{{"role": "user", "content": "..."}}]'
        )
    config = _object(files, "tokenizer_config.json")
    source = _template(files, config)
    if source is None:
        raise ValueError(
            "there is no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json): pass the whole prompt as text"
        )
    template = _compile(source)
    known = {"tools": None, "documents": None, **_special_tokens(files, config), **variables}
    try:
        return template.render(messages=turns, add_generation_prompt=add_generation_prompt, **known)
    except Exception as error:  # a template is a program, so it may raise any error
        raise ValueError(f"the chat template refuses these messages: {error}") from None


def _is_message(message: object) -> bool:
    """Does it have a role, and a text or a list of parts as content?  Templates check the rest."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    if isinstance(content, str | None):
        return True
    return all(isinstance(part, Mapping) for part in items(content) or [None])


def _template(files: Mapping[str, bytes], config: dict[str, Any]) -> str | None:
    """The source of the chat template, or None if the folder has none."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode()
    template = config.get("chat_template")
    if not isinstance(template, list):
        return template
    by_name = {entry["name"]: entry["template"] for entry in template}
    if "default" not in by_name:
        raise ValueError(
            f"the chat templates are {', '.join(by_name)}, and none is the default: "
            "keep one of them"
        )
    return by_name["default"]


def _special_tokens(files: Mapping[str, bytes], config: dict[str, Any]) -> dict[str, Any]:
    """{"bos_token": text, ...}; tokenizer_config.json overrides special_tokens_map.json."""
    tokens = {
        **_object(files, "special_tokens_map.json"),
        **{k: v for k, v in config.items() if v is not None},
    }
    special = {name: tokens[name] for name in _SPECIAL if tokens.get(name) is not None}
    return {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in special.items()
    }


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The JSON object in the file `name`; {} if there is no such file."""
    try:
        content = json.loads(files.get(name, b"{}"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{name} holds a {type(content).__name__}, not an object")
    return content


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    try:
        import jinja2
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ValueError("chat templates need jinja2: pip install 'specjax[chat]'") from None

    class Generation(Extension):
        """{% generation %} marks the assistant's text for training; it renders as its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson  # Jinja's own filter escapes HTML
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template is damaged: {error}") from None
