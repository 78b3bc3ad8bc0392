"""Calls of tools in chats: a constraint that makes a model call one, and a reader of what it wrote.

Each family of models was trained on a form of calls, and its chat template tells the model of it.
`form_of` recognises the form in the template.
"""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence

from specjax.constraints import JSONSchema
from specjax.serve.http.problems import refuse
from specjax.types import Json

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_NAMED = '{"type": "function", "function": {"name": ...}}'


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that a model wrote."""

    name: str
    arguments: str  # JSON of an object


@dataclasses.dataclass(frozen=True)
class Form:
    """A form of calls.

    Attributes:
      opens: a call begins with this text; "": the whole text is one call.
      closes: it ends with this text.
      key: the field with the arguments; None: they are tags, as Qwen3-Coder writes them.
    """

    opens: str
    closes: str
    key: str | None

    def settled(self, text: str) -> int:
        """Returns how many characters of an unfinished text cannot belong to a call."""
        if not self.opens:
            return 0 if text.lstrip()[:1] in ("", "{") else len(text)
        at = text.find(self.opens)
        if at < 0:
            ends = (n for n in range(len(self.opens) - 1, 0, -1) if text.endswith(self.opens[:n]))
            at = len(text) - next(ends, 0)
        return len(text[:at].rstrip())


_TAGGED = Form("<tool_call>", "</tool_call>", None)
_HERMES = Form("<tool_call>", "</tool_call>", "arguments")
_LLAMA = Form("", "", "parameters")


def form_of(template: str) -> Form | None:
    """Returns the form of calls that a chat template teaches; None: it teaches none of these.

    Example:
      >>> form_of("... <tool_call> ... {{ tools }}").key
      'arguments'
    """
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        return _TAGGED if "<function=" in template else _HERMES
    return _LLAMA if '"parameters":' in template and '"name":' in template else None


@dataclasses.dataclass(frozen=True)
class Tools:
    """The tools of a request, and whether the model has to call one."""

    functions: Mapping[str, Mapping[str, object]]  # name: schema of its arguments
    given: Sequence[Mapping[str, object]]  # as the client sent them, for the chat template
    form: Form
    required: bool
    several: bool  # calls of a text

    def constraint(self) -> JSONSchema | None:
        """Returns what the text has to be if the model has to call a tool: one call."""
        form, key = self.form, self.form.key
        if not self.required:
            return None
        if key is None:
            refuse(
                "the chat template of this target writes arguments as tags, which no schema holds: "
                'send tool_choice "auto"',
                "tool_choice",
            )
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    key: _moved(schema, f"#/anyOf/{number}/properties/{key}"),
                },
                "required": ["name", key],
            }
            for number, (name, schema) in enumerate(self.functions.items())
        ]
        before = f"{form.opens}\n" if form.opens else ""
        after = f"\n{form.closes}" if form.closes else ""
        return JSONSchema({"anyOf": calls}, before=before, after=after)

    def read(self, text: str) -> tuple[str, list[Call]]:
        """Returns the text of a finished answer without its calls, and the calls.

        What is no call of one of the tools stays in the text.
        """
        form = self.form
        if not form.opens:
            call = self._call(text)
            return ("", [call]) if call else (text, [])
        block = re.compile(
            rf"\s*{re.escape(form.opens)}(.*?)(?:{re.escape(form.closes)}|\Z)", re.DOTALL
        )
        calls: list[Call] = []

        def taken(found: re.Match[str]) -> str:
            call = self._call(found[1])
            if call is None or (calls and not self.several):
                return found[0] if call is None else ""
            calls.append(call)
            return ""

        left = block.sub(taken, text)
        return left.rstrip() if calls else left, calls

    def _call(self, text: str) -> Call | None:
        name, arguments = self._tagged(text) if self.form.key is None else self._json(text)
        if name not in self.functions or not isinstance(arguments, dict):
            return None
        return Call(name, json.dumps(arguments, ensure_ascii=False))

    def _json(self, text: str) -> tuple[str, object]:
        try:
            made = json.loads(text)
        except (ValueError, RecursionError):
            return "", None
        if not isinstance(made, dict) or not isinstance(made.get("name"), str):
            return "", None
        return made["name"], made.get(self.form.key or "", {})

    def _tagged(self, text: str) -> tuple[str, object]:
        whole = re.fullmatch(r"\s*<function=([^>]*)>(.*?)(?:</function>)?\s*", text, re.DOTALL)
        if whole is None or whole[1] not in self.functions:
            return "", None
        types = self.functions[whole[1]].get("properties")
        found = re.findall(r"<parameter=([^>]*)>\n?(.*?)\n?</parameter>", whole[2], re.DOTALL)
        return whole[1], {name: _value(value, types, name) for name, value in found}


def tools_of(
    given: Sequence[Mapping[str, object]] | None, choice: object, several: bool, template: str
) -> Tools | None:
    """Returns the tools that a model may call; None: it may call none.

    Args:
      given: OpenAI's field `tools`.
      choice: `tool_choice`: "none", "auto", "required", or the name of a function.
      several: `parallel_tool_calls`.
      template: the source of the chat template of the target; "": it has none.

    Raises:
      Problem: a field that cannot be used.
    """
    if not given:
        if choice not in (None, "none", "auto"):
            refuse("tool_choice needs tools", "tool_choice")
        return None
    functions: dict[str, Mapping[str, object]] = {}
    for number, tool in enumerate(given):
        function = _object(tool.get("function"))
        name = function.get("name")
        if tool.get("type") != "function" or not isinstance(name, str):
            refuse(f"tools[{number}] is no function; send {_NAMED}", "tools")
        if not _NAME.fullmatch(name) or name in functions:
            fault = "another one has" if name in functions else "is not of 1 to 64 of a-zA-Z0-9_.-"
            refuse(f"tools[{number}] has the name {name!r}, which {fault}: rename it", "tools")
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(schema, dict):
            refuse(f"the parameters of tools[{number}] are no schema: send an object", "tools")
        functions[name] = schema
    if choice == "none":
        return None
    form = form_of(template)
    if form is None:
        refuse(
            "the chat template of this target teaches no form of calls that this server reads: "
            "describe the tools in a message, and ask for JSON with response_format",
            "tools",
        )
    chosen = _chosen(choice, functions)
    return Tools(chosen, given, form, choice not in (None, "auto"), several)


def _chosen(
    choice: object, functions: Mapping[str, Mapping[str, object]]
) -> Mapping[str, Mapping[str, object]]:
    """Returns the functions of which a model may call one."""
    if choice in (None, "auto", "required"):
        return functions
    name = _object(_object(choice).get("function")).get("name")
    if not isinstance(name, str) or name not in functions:
        listed = ", ".join(functions)
        refuse(
            f'tool_choice={choice!r}; send "none", "auto", "required" or {_NAMED} with one of '
            f"{listed}",
            "tool_choice",
        )
    return {name: functions[name]}


def written(calls: Sequence[Call]) -> list[dict[str, Json]]:
    """Returns calls as OpenAI's API has them."""
    return [
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]


def for_template(message: Mapping[str, object]) -> Mapping[str, object]:
    """Returns a message whose calls have their arguments as objects, as chat templates read them.

    OpenAI's clients send them as JSON in a text.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    made = []
    for call in map(_object, calls):
        function = _object(call.get("function"))
        arguments = function.get("arguments")
        if not isinstance(arguments, str | dict):
            refuse(f"a message has the call {call!r}; send {_NAMED} with arguments", "messages")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                refuse(f"the arguments of a call are not JSON ({error})", "messages")
        made.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": made}


def _moved(schema: object, at: str) -> object:
    """Returns a schema whose references lead to the same places when it stands at the path `at`."""
    moved: Callable[[object], object] = lambda part: _moved(part, at)  # noqa: E731
    if isinstance(schema, list):
        return [moved(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: moved(part) for name, part in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        made["$ref"] = at + reference[1:]
    return made


def _object(value: object) -> dict[str, object]:
    """Returns an object of JSON; {} for another value."""
    return value if isinstance(value, dict) else {}


def _value(text: str, types: object, name: str) -> object:
    """Returns the value between two tags: a text if the schema says so, and else JSON."""
    if _object(_object(types).get(name)).get("type") == "string":
        return text
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value
