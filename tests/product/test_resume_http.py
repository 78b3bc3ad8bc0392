"""Streams over HTTP that go on at another server, as clients that lose a connection use them."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import serving
from serving import post, running, send
from test_serve_expected import engine

pytestmark = pytest.mark.xdist_group("resume http")  # a share takes all of them, or none

for package in ("starlette", "uvicorn", "pydantic", "sse_starlette", "prometheus_client"):
    pytest.importorskip(package)

ASK = {"prompt": "def main(", "max_tokens": 18, "seed": 3, "temperature": 0.8, "stream": True}
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def ports():
    """Two servers of one model: with room for expected texts, and without, of other drafters."""
    with running(engine()) as (_, one), running(serving.engine()) as (_, two):
        yield one, two


def stream(
    port: int, body: Any, path: str = PATH, last: str | None = None
) -> list[tuple[str | None, Any]]:
    """The id and the data of each event; `last` is sent back as the id of the last event."""
    headers = {} if last is None else {"Last-Event-ID": last}
    status, _, content = send(port, "POST", path, body, **headers)
    assert status == 200, content
    made = []
    for block in content.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        if "data" in fields:
            data = fields["data"]
            made.append((fields.get("id"), data if data == "[DONE]" else json.loads(data)))
    return made


def told(events: list[tuple[str | None, Any]]) -> dict[int, list[Any]]:
    """Text, tokens and everything else that a client keeps of each text."""
    made: dict[int, list[Any]] = {}
    for _, data in events:
        for choice in [] if data == "[DONE]" else data["choices"]:
            text, tokens, calls, roles, ends = made.setdefault(choice["index"], ["", [], [], 0, []])
            delta = choice.get("delta", choice)
            made[choice["index"]] = [
                text + (delta.get("content", delta.get("text")) or ""),
                tokens + choice.get("token_ids", []),
                calls + [call["function"] for call in delta.get("tool_calls", [])],
                roles + ("role" in delta),
                ends + [x for x in [choice["finish_reason"]] if x],
            ]
    return made


def status_of(port: int, body: Any, last: str | None = None) -> tuple[int, str]:
    headers = {} if last is None else {"Last-Event-ID": last}
    status, _, content = send(port, "POST", PATH, body, **headers)
    return status, content.decode()


CHAT = {"messages": [{"role": "user", "content": "write"}], "max_tokens": 16, "seed": 1,
        "temperature": 1.0, "stream": True}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "light", "parameters": {
    "type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"],
    "additionalProperties": False}}}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, ASK),
        (PATH, {**ASK, "n": 3, "speculation": {"drafter": "draft"}}),
        (PATH, {**ASK, "prompt": ["def main(", "import "], "n": 2, "stop": ["e", "\n"],
                "stream_options": {"include_usage": True}}),
        (PATH, {**ASK, "temperature": 1.5, "presence_penalty": 0.5, "return_guesses": True}),
        ("/v1/chat/completions", {**CHAT, "n": 2}),
        ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "required",
                                  "max_tokens": 60}),
    ],
)  # fmt: skip
def test_a_stream_goes_on_after_any_event(ports, path, body):
    """At either server: what a client got before and after is one whole stream, nothing twice."""
    whole = stream(ports[0], body, path)
    ids = [name for name, _ in whole if name is not None]
    assert len(set(ids)) == len(ids) >= 2
    cuts = [n for n, (name, _) in enumerate(whole) if name is not None]
    chosen = {cuts[0], cuts[1], cuts[len(cuts) // 2], cuts[-2], cuts[-1]}
    for port, cut in itertools.product(ports, sorted(chosen)):
        later = stream(port, body, path, last=whole[cut][0])
        assert told(whole[: cut + 1] + later) == told(whole)
        assert later[-1] == (None, "[DONE]")
        assert [name for name, _ in later if name][-1:] in ([ids[-1]], [])


def test_a_stream_is_resumed_twice_and_without_a_seed(ports):
    """The id has the seed that was drawn, and the second id is of the whole text, too."""
    body = {name: value for name, value in ASK.items() if name != "seed"}
    first = stream(ports[0], body)
    cut = next(n for n, (name, _) in enumerate(first) if name is not None)
    second = stream(ports[1], body, last=first[cut][0])
    third = stream(ports[0], body, last=second[0][0])
    assert told([*first[: cut + 1], second[0], *third]) == told(first)


def test_answers_say_what_resuming_needs(ports):
    """Tokens, seed, index and the hash of the model, in whole answers and in streams."""
    plain = {**ASK, "stream": False, "n": 2}
    answer, events = post(ports[0], PATH, plain), stream(ports[0], {**plain, "stream": True})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["metrics"]["seed"] == 3
    assert answer["system_fingerprint"] == engine().model_hash == serving.engine().model_hash
    made = told(events)
    assert [made[n][1] for n in range(2)] == [choice["token_ids"] for choice in answer["choices"]]
    assert {data["system_fingerprint"] for _, data in events[:-1]} == {engine().model_hash}


@pytest.mark.parametrize("fast", [False, True])
def test_tokens_instead_of_an_id(ports, fast):
    """With the tokens they are drafts, or read with the prompt; beside an id they must be its."""
    body = {**ASK, "n": 2}
    whole = stream(ports[0], body)
    texts = told(whole)
    kept = [texts[0][1][:9], texts[1][1][:4]]
    for port in ports:
        resume = {"resume": {"token_ids": kept, "fast": fast}}
        later = told(stream(port, {**body, **resume}))
        for index, tokens in enumerate(kept):
            assert tokens + later[index][1] == texts[index][1]
            assert texts[index][0].endswith(later[index][0])
    name = [name for name, _ in whole if name is not None][2]
    counts = [int(place.split("-")[0]) for place in name.rsplit(".", 1)[1].split(",")]
    had = [texts[index][1][:count] for index, count in enumerate(counts)]
    both = {**body, "resume": {"token_ids": had, "fast": fast}}
    later = told(stream(ports[0], both, last=name))
    assert [had[n] + later[n][1] for n in range(2)] == [texts[n][1] for n in range(2)]
    wrong = {**both, "resume": {"token_ids": [[*had[0], 5], had[1]]}}
    status, content = status_of(ports[0], wrong, last=name)
    assert status == 409 and "are not the" in content


def test_expected_texts_change_nothing(ports):
    texts = told(stream(ports[0], {**ASK, "n": 2}))
    for expected in ([texts[0][1], texts[1][1]], [texts[1][1], []], [[], [7] * 30]):
        body = {**ASK, "n": 2, "stream": False, "return_guesses": True,
                "speculation": {"drafter": "lookup", "expected_token_ids": expected}}  # fmt: skip
        answer = post(ports[0], PATH, body)
        assert [choice["token_ids"] for choice in answer["choices"]] == [
            texts[n][1] for n in (0, 1)
        ]
        if expected[0] == texts[0][1]:
            figures = answer["metrics"]["speculative_decoding"]
            assert figures["num_spec_steps"] == 2 * 3  # 18 tokens of 7 a step
            assert answer["choices"][0]["guesses"][0] == [1, "expected", 6]


def test_planted_faults_are_found(ports):
    """Another prompt, setting, seed, kind of request, model, a token; and ids that are none."""
    whole = stream(ports[0], ASK)
    name = [name for name, _ in whole if name is not None][1]
    model, request, seed, place = name.split(".")
    count, characters, _, tail = place.split("-")
    faults = [
        ({**ASK, "prompt": "def mean("}, name, "of another request"),
        ({**ASK, "temperature": 0.7}, name, "of another request"),
        ({**ASK, "max_tokens": 17}, name, "of another request"),
        ({**ASK, "stop": "x"}, name, "of another request"),
        ({**ASK, "seed": 4}, name, "of another request"),
        ({**ASK, "n": 2}, name, "of another request"),
        (ASK, name.replace(model, "0" * 16), "of the model 0000000000000000"),
        (ASK, ".".join([model, request, seed, f"{count}-{characters}-{'0' * 16}-{tail}"]),
         "tokens of the resumed text differ"),
    ]  # fmt: skip
    for port in ports:
        for body, sent, message in faults:
            status, content = status_of(port, body, last=sent)
            assert (status, message in content) == (409, True), (body, content)
    tokens = told(whole)[0][1]
    wrong = {"token_ids": [[*tokens[:5], (tokens[5] + 1) % 500]]}
    status, content = status_of(ports[0], {**ASK, "resume": wrong})
    assert status == 409
    assert (
        f"token 5 of the resumed text was {wrong['token_ids'][0][5]} and is {tokens[5]}" in content
    )
    assert json.loads(content)["error"]["type"] == "conflict_error"
    for sent in ("12", "", "x" * 200, name + "-1", name.replace("-", "_")):
        status, content = status_of(ports[0], ASK, last=sent)
        assert status == 400 and "is not an id of this server's streams" in content


def test_a_client_that_leaves_while_tokens_are_checked_frees_the_slot(ports):
    tokens = told(stream(ports[0], ASK))[0][1]
    body = {**ASK, "resume": {"token_ids": [tokens]}}
    assert told(stream(ports[0], body))[0][4] == ["length"]
    assert engine().load().running == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stream": False, "resume": {"token_ids": [[1]]}}, "only a stream is resumed"),
        ({"resume": {"token_ids": [[1], [2]]}}, "2 lists for 1 texts"),
        ({"resume": {"token_ids": [[1] * 19]}}, "token_ids has 19 tokens, and max_tokens=18"),
        ({"resume": {"token_ids": [[10**6]]}}, "token ids from 1000000"),
        ({"resume": {"fast": True}}, "token_ids"),
        ({"resume": {"token_ids": [["a"]]}}, "is not allowed"),
        ({"speculation": {"expected_token_ids": [[1], [2]]}}, "2 lists for 1 texts"),
        ({"speculation": {"expected_token_ids": [[-1]]}}, "token ids from -1"),
    ],
)  # fmt: skip
def test_bad_fields_are_refused(ports, fields, message):
    status, content = status_of(ports[0], {**ASK, **fields})
    assert status == 400 and message in content, content


def test_a_server_without_room_says_so(ports):
    body = {**ASK, "speculation": {"expected_token_ids": [[1]]}}
    status, content = status_of(ports[1], body)
    assert status == 400 and "start it with --expected 8" in content
