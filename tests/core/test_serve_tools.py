"""Tools in chats: the call that a model must write, the calls that it wrote, and refusals."""

from __future__ import annotations

import dataclasses
import json

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("sse_starlette")

import serving
from serving import events, post, running, send

from specjax.serve.http.problems import Problem
from specjax.serve.http.tools import Call, for_template, form_of, tools_of

HERMES = "{{ tools }} <tool_call>"
TAGGED = "{{ tools }} <tool_call> <function=name>"
LLAMA = '{{ tools }} {"name": function name, "parameters": dictionary}'
LIGHT = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
FIND = {
    "type": "object",
    "properties": {"text": {"type": "string", "maxLength": 8}, "most": {"$ref": "#/$defs/most"}},
    "required": ["text", "most"],
    "$defs": {"most": {"enum": [1, 10]}},
}


def function(name, schema):
    return {"type": "function", "function": {"name": name, "parameters": schema}}


GIVEN = [function("light", LIGHT), function("find", FIND)]
ASK = {
    "messages": [{"role": "user", "content": "x"}], "max_tokens": 96, "seed": 2, "tools": GIVEN,
    "temperature": 0.9,
}  # fmt: skip


@pytest.fixture(scope="module")
def port():
    with running(serving.engine()) as (_, port):
        yield port


def one(name, text):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'


TEXTS = [
    (HERMES, "no call", "no call", []),
    (HERMES, "a <tool_cat> ", "a <tool_cat> ", []),
    (HERMES, one("light", '{"on": true}'), "", [Call("light", '{"on": true}')]),
    (HERMES, "So\n" + one("find", '{"text": "ä"}'), "So", [Call("find", '{"text": "ä"}')]),
    (
        HERMES, f"{one('light', '{}')}\n{one('find', '{}')} then", " then",
        [Call("light", "{}"), Call("find", "{}")],
    ),
    (HERMES, f"b {one('light', '{}')[:-12]}", "b", [Call("light", "{}")]),
    (HERMES, f"b {one('other', '{}')}", f"b {one('other', '{}')}", []),
    (HERMES, f"b {one('light', '{')}", f"b {one('light', '{')}", []),
    (HERMES, f"b {one('light', '[]')}", f"b {one('light', '[]')}", []),
    (
        TAGGED,
        "<tool_call>\n<function=find>\n<parameter=text>\n10\n</parameter>\n<parameter=most>\n10\n"
        "</parameter>\n</function>\n</tool_call>",
        "", [Call("find", '{"text": "10", "most": 10}')],
    ),
    (TAGGED, one("light", '{"on": true}'), one("light", '{"on": true}'), []),
    (LLAMA, '{"name": "light", "parameters": {"on": false}}', "", [Call("light", '{"on": false}')]),
    (LLAMA, '{"name": "light"', '{"name": "light"', []),
    (LLAMA, "{} is empty", "{} is empty", []),
    (LLAMA, "plain", "plain", []),
]  # fmt: skip


@pytest.mark.parametrize("template, text, left, calls", TEXTS)
def test_what_a_model_wrote_is_read(template, text, left, calls):
    """Streamed, too: what is shown of an unfinished text stays the beginning of the whole."""
    tools = tools_of(GIVEN, "auto", True, template)
    assert tools.read(text) == (left, calls)
    shown = ""
    for end in range(len(text) + 1):
        now = text[: tools.form.settled(text[:end])]
        assert now.startswith(shown) or len(now) < len(shown)
        shown = max(shown, now, key=len)
        assert left.startswith(shown)


def test_at_most_one_call():
    text = one("light", "{}") + one("find", "{}")
    tools = tools_of(GIVEN, "auto", False, HERMES)
    assert tools.read(text) == ("", [Call("light", "{}")])


def test_forms_of_templates():
    assert form_of(HERMES).key == "arguments" and form_of(LLAMA).key == "parameters"
    assert form_of(TAGGED).key is None
    assert form_of("<tool_call>") is None and form_of("{{ tools }}") is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find"}}])
def test_a_call_is_written(port, choice):
    """By a model that knows no tools; with every drafter the same, and streamed."""
    wanted = None
    for drafter in ("none", "lookup", "draft", "tree"):
        asked = {**ASK, "tool_choice": choice, "n": 2, "speculation": {"drafter": drafter}}
        answer = post(port, "/v1/chat/completions", asked)
        assert [made["finish_reason"] for made in answer["choices"]] == ["tool_calls"] * 2
        messages = [made["message"] for made in answer["choices"]]
        assert all(message["content"] is None for message in messages)
        calls = [message["tool_calls"][0]["function"] for message in messages]
        wanted = wanted or calls
        assert calls == wanted
    for call in wanted:
        arguments = json.loads(call["arguments"])
        assert call["name"] == "find" or choice == "required"
        if call["name"] == "find":
            assert isinstance(arguments["text"], str) and arguments["most"] in (1, 10)
        else:
            assert arguments["on"] in (True, False)
    *chunks, last = events(send(port, "POST", "/v1/chat/completions", {**asked, "stream": True})[2])
    assert last == "[DONE]"
    streamed, ends = [None, None], [None, None]
    for made in (made for chunk in chunks for made in chunk["choices"]):
        assert not made["delta"].get("content")
        for call in made["delta"].get("tool_calls", ()):
            assert call["index"] == 0 and call["id"].startswith("call_")
            streamed[made["index"]] = call["function"]
        ends[made["index"]] = made["finish_reason"] or ends[made["index"]]
    assert streamed == wanted and ends == ["tool_calls"] * 2


def test_tools_change_the_prompt(port):
    """They are variables of the chat template, unless no tool may be called."""
    free = post(port, "/v1/chat/completions", {**ASK, "max_tokens": 8})
    without = {name: value for name, value in ASK.items() if name != "tools"}
    none = post(port, "/v1/chat/completions", {**ASK, "max_tokens": 8, "tool_choice": "none"})
    plain = post(port, "/v1/chat/completions", {**without, "max_tokens": 8})
    counts = [answer["usage"]["prompt_tokens"] for answer in (free, none, plain)]
    assert counts[0] > counts[1] == counts[2]
    assert none["choices"] == plain["choices"]
    assert "tool_calls" not in free["choices"][0]["message"]


def test_calls_in_messages():
    """Templates read arguments as objects, and OpenAI's clients send them as a text."""
    function = {"name": "light", "arguments": '{"on": true}'}
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    (call,) = for_template(message)["tool_calls"]
    assert call["function"] == {"name": "light", "arguments": {"on": True}}
    user = {"role": "user", "content": "x"}
    assert for_template(user) == user
    for wrong in ({}, {"function": {"name": "f"}}, {"function": {**function, "arguments": "{"}}):
        with pytest.raises(Problem, match="call"):
            for_template({**message, "tool_calls": [wrong]})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tools": [{}]}, "tools\\[0\\] is no function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools\\[0\\] is no function"),
        ({"tools": [function("a b", LIGHT)]}, "'a b', which is not of"),
        ({"tools": [function("f", LIGHT)] * 2}, "tools\\[1\\] .*another one has"),
        ({"tools": [function("f", [1])]}, "no schema"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice needs tools"),
        ({"tool_choice": "all"}, "tool_choice='all'; send .* light, find"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "one of light, find"),
        ({"tool_choice": "required", "max_tokens": 3}, "max_tokens=3 is too small"),
        (
            {"tool_choice": "required", "tools": [function("f", {"type": "array", "contains": 1})]},
            "contains",
        ),
        (
            {
                "tool_choice": "required",
                "response_format": {"type": "json_object", "schema": {"const": 1}},
            },
            "either a call or of a response_format",
        ),
    ],
)
def test_refused_tools(port, changes, message):
    status, _, content = send(port, "POST", "/v1/chat/completions", {**ASK, **changes})
    assert status == 400
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(json.loads(content)["error"]["message"])


def test_templates_that_teach_no_form():
    with pytest.raises(Problem, match="teaches no form of calls"):
        tools_of(GIVEN, "auto", True, "{{ messages }}")
    tools = tools_of(GIVEN, "required", True, TAGGED)
    with pytest.raises(Problem, match='send tool_choice "auto"'):
        tools.constraint()
    assert dataclasses.replace(tools, required=False).constraint() is None
