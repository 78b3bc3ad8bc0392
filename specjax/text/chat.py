"""Conversations as text, by the Jinja template that comes with a tokenizer.

A template is a program from a model's folder, so it runs in Jinja's immutable sandbox, with what Hugging Face templates
expect and nothing else in reach.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.arguments import items, shown

Messages = Sequence[Mapping[str, Any]]
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
    **variables: Any,
) -> str:
    """The text of a conversation; its special tokens are written out, so encode it with `add_special_tokens=False`.

    Args:
      files: of the model's folder, by name (`LanguageModel.files`).
      messages: the conversation so far.
      add_generation_prompt: open the assistant's turn.
      variables: what this template reads besides (for example `enable_thinking`).

    Raises:
      ValueError: no template, a broken one, or one that refuses these messages.
    """
    found = items(messages)
    if not found or not all(_is_message(message) for message in found):
        raise ValueError(
            f'messages={shown(messages)}; pass a list like [{{"role": "user", "content": "..."}}]'
        )
    config = _object(files, "tokenizer_config.json")
    source = _template(files, config)
    if source is None:
        raise ValueError(
            "there is no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): "
            "pass the whole prompt as text"
        )
    template = _compile(source)
    known = {"tools": None, "documents": None, **_special_tokens(files, config), **variables}
    try:
        return template.render(messages=found, add_generation_prompt=add_generation_prompt, **known)
    except Exception as error:  # a template is a program: its mistakes are of any type
        raise ValueError(f"the chat template refuses these messages: {error}") from None


def _is_message(message: Any) -> bool:
    """Has it a role, and as content a text or a list of parts?  Templates judge the rest."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    if isinstance(content, str | None):
        return True
    return all(isinstance(part, Mapping) for part in items(content) or [None])


def _template(files: Mapping[str, bytes], config: dict[str, Any]) -> str | None:
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode()
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = {entry["name"]: entry["template"] for entry in found}
        if "default" not in found:
            raise ValueError(
                f"the chat templates are {', '.join(found)}, and none is the default: keep one of them"
            )
        return found["default"]
    return found


def _special_tokens(files: Mapping[str, bytes], config: dict[str, Any]) -> dict[str, Any]:
    """{"bos_token": text, ...}; tokenizer_config.json goes first."""
    found = {
        **_object(files, "special_tokens_map.json"),
        **{k: v for k, v in config.items() if v is not None},
    }
    texts = {name: found[name] for name in _SPECIAL if found.get(name) is not None}
    return {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in texts.items()
    }


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        found = json.loads(files.get(name, b"{}"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{name} holds a {type(found).__name__}, not an object")
    return found


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> Any:
    try:
        import jinja2
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ValueError("chat templates need jinja2: pip install 'specjax[chat]'") from None

    class Generation(Extension):
        """{% generation %} marks for training what the assistant says; here it is its content alone."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
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
    environment.filters["tojson"] = tojson  # Jinja's own escapes HTML
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template is damaged: {error}") from None
