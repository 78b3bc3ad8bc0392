"""The ingress of a fleet without Ray: replicas die anywhere, and the client sees nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import jax
import pytest
import serving
from test_serve_expected import engine

from specjax.serve import Engine

for package in ("starlette", "uvicorn", "pydantic", "sse_starlette", "prometheus_client"):
    pytest.importorskip(package)

import specjax.serve.fleet.ingress as ingresses  # noqa: E402
from specjax.serve.fleet import Call, Fleet, Head, make_ingress  # noqa: E402
from specjax.serve.fleet.call import answers, prompt_of  # noqa: E402
from specjax.serve.fleet.events import Absent, Events, Lost  # noqa: E402
from specjax.serve.fleet.ingress import Full  # noqa: E402
from specjax.serve.http import Limits, make_app  # noqa: E402

pytestmark = pytest.mark.xdist_group("ingress")  # a share takes all of them, or none

PATH, CHATS = "/v1/completions", "/v1/chat/completions"
ASK = {"prompt": "def main(", "max_tokens": 14, "seed": 3, "temperature": 0.8, "stream": True}
SCHEMA = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"],
          "additionalProperties": False}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "light", "parameters": SCHEMA}}
CHAT = {"messages": [{"role": "user", "content": "write"}], "max_tokens": 14, "temperature": 1.0,
        "stream": True, "seed": 1}  # fmt: skip

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (PATH, ASK),
    "n": (PATH, {**ASK, "n": 3, "speculation": {"drafter": "draft"},
                 "stream_options": {"include_usage": True}}),
    "stops": (PATH, {**ASK, "prompt": ["def main(", "import "], "stop": ["e", "\n"]}),
    "penalties": (PATH, {**ASK, "temperature": 1.5, "presence_penalty": 0.5, "top_k": 50}),
    "schema": (PATH, {**ASK, "max_tokens": 60, "response_format": {
        "type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}),
    "chat": (CHATS, {**CHAT, "n": 2}),
    "tools": (CHATS, {**CHAT, "tools": [TOOL], "tool_choice": "required", "max_tokens": 60}),
}  # fmt: skip


class Replicas:
    """Replicas of which each call takes the next, that die after so many bytes of an answer."""

    def __init__(self, apps: list[Any], dies: list[int | Exception]) -> None:
        self.apps, self.dies, self.calls = apps, dies, []

    def ask(self, call: Call) -> AsyncGenerator[Head | bytes, None]:
        number = len(self.calls)
        self.calls.append(call)
        return self._parts(call, number)

    async def _parts(self, call: Call, number: int) -> AsyncGenerator[Head | bytes, None]:
        left = self.dies[number] if number < len(self.dies) else 10**9
        if isinstance(left, Exception):
            raise left
        async for part in answers(self.apps[number % len(self.apps)], call):
            if isinstance(part, bytes):
                if left <= len(part):
                    yield part[:left]
                    raise Lost("killed")
                left -= len(part)
            yield part


@functools.cache
def app(room: bool = True) -> Any:
    return make_app(engine() if room else serving.engine(), Limits())


def sent(
    replicas: Replicas, path: str, body: Any, headers: dict[str, str] | None = None, **more: Any
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer of an ingress before these replicas."""

    async def collect() -> tuple[int, dict[str, str], bytes]:
        ingress = make_ingress(replicas.ask, patience=0.5, **more)
        call = Call("POST", path, headers or {}, json.dumps(body).encode())
        head, *parts = [part async for part in answers(ingress, call)]
        assert isinstance(head, Head)
        return head.status, head.headers, b"".join(x for x in parts if isinstance(x, bytes))

    return asyncio.run(collect())


def told(content: bytes) -> tuple[list[Any], dict[int, list[Any]]]:
    """What a client knows of a whole stream: its ids and heads, and each text with its tokens."""
    blocks = content.decode().split("\n\n")
    assert blocks[-1] == "" and blocks[-2] == "data: [DONE]" and content.count(b"[DONE]") == 1
    chunks = [json.loads(block.split("data: ", 1)[1]) for block in blocks[:-2]]
    heads = {(one["id"], one["created"], one["system_fingerprint"]) for one in chunks}
    assert len(heads) == 1, heads
    made: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice.get("delta", choice)
            text = made.setdefault(choice["index"], ["", [], [], 0, []])
            text[0] += delta.get("content", delta.get("text")) or ""
            text[1] += choice.get("token_ids", [])
            text[2] += [one["function"] for one in delta.get("tool_calls", [])]
            text[3] += "role" in delta
            text[4] += [x for x in [choice["finish_reason"]] if x]
    return [chunk["usage"]["total_tokens"] for chunk in chunks if "usage" in chunk], made


@pytest.mark.parametrize("kind", BODIES)
def test_a_replica_dies_anywhere(kind):
    """At each event and inside of one, at the head, twice in a row: one stream, nothing twice."""
    path, body = BODIES[kind]
    status, _, content = sent(Replicas([app()], []), path, body)
    assert status == 200
    whole = told(content)
    assert all(len(one[4]) == 1 for one in whole[1].values())
    ends, at = [], 0
    for event in Events().add(content):
        ends.append(at := at + len(event))
    places = {0, 1, ends[-1] - 1, *ends[:3], ends[len(ends) // 2] - 7, *ends[-4:]}
    for number, place in enumerate(sorted(places - {ends[-1]})):
        dies: list[Any] = [place] if number % 2 else [place, 0, Lost("killed"), 900, Full("full")]
        replicas = Replicas([app(), app(room=False)], dies)
        status, _, content = sent(replicas, path, body)
        assert status == 200 and told(content) == whole, (kind, place)
        # The chunks of a stream depend on the clock, so it may have ended before this place.
        assert len(replicas.calls) > 1 or place >= len(content)


def test_a_seed_is_drawn_once_and_tokens_are_drafts():
    """A request without a seed goes on with that of its first replica; so does one with an id."""
    body = {name: value for name, value in ASK.items() if name != "seed"}
    body |= {"ignore_eos": True, "max_tokens": 60, "speculation": {"drafter": "none"}}
    replicas = Replicas([app()], [900])
    _, headers, content = sent(replicas, PATH, body, {"x-request-id": "mine"})
    assert headers["x-request-id"] == "mine" and b'"id": "cmpl-mine"' in content
    first, second = (json.loads(call.body) for call in replicas.calls)
    assert first["seed"] == second["seed"]
    text = told(content)[1][0]
    known = second["resume"]["token_ids"][0]
    assert 0 < len(known) < len(text[1]) and text[1][: len(known)] == known
    assert replicas.calls[1].headers["last-event-id"].split(".")[3].startswith(f"{len(known)}-")
    # The client itself comes back with the id of an event, and this replica dies, too.
    events = [one for one in Events().add(content) if one.startswith(b"id: ")]
    name = events[1].decode().split("\n")[0][4:]
    again = Replicas([app()], [700])
    status, _, rest = sent(again, PATH, body, {"last-event-id": name, "x-request-id": "mine"})
    assert status == 200 and len(again.calls) == 2
    later = told(rest)[1][0]
    assert told(b"".join(events[:2]) + b"data: [DONE]\n\n")[1][0][0] + later[0] == text[0]


def test_other_weights_are_found():
    """Planted: the replica that goes on has other weights.  The stream ends with an error."""
    one = engine()
    params = jax.tree.map(lambda x: x[..., ::-1], one.target.params)
    target = dataclasses.replace(one.target, params=params)
    whole = told(sent(Replicas([app()], []), PATH, ASK)[2])[1][0]
    with Engine(target, {}, slots=1, capacity=64, chunk=16) as planted:
        other = make_app(planted, Limits())
        body = {**ASK, "speculation": {"drafter": "none"}}
        status, _, content = sent(Replicas([app(), other, other, other], [1100]), PATH, body)
        assert status == 200
        *chunks, error, done = content.decode().split("\n\n")[:-1]
        assert done == "data: [DONE]" and json.loads(error[6:])["error"]["code"] == 409
        assert "weights" in error
        tokens = [t for x in chunks for t in
                  json.loads(x.split("data: ")[1])["choices"][0]["token_ids"]]  # fmt: skip
        assert tokens and whole[1][: len(tokens)] == tokens
        # If a replica with the same weights is left, it goes on.
        replicas = Replicas([app(), other, app()], [1100])
        assert told(sent(replicas, PATH, body)[2])[1][0] == whole


def test_what_is_not_resumed():
    """Whole answers are made again; a full queue is 429; nobody there is 503; errors pass."""
    body = {**ASK, "stream": False}
    replicas = Replicas([app()], [10, Lost("killed")])
    status, _, content = sent(replicas, PATH, body)
    answer = json.loads(content)
    assert (status, len(replicas.calls)) == (200, 3)
    assert (
        answer["choices"][0]["token_ids"]
        == told(sent(Replicas([app()], []), PATH, ASK)[2])[1][0][1]
    )
    full = make_ingress(Replicas([app()], [Full("too many")] * 9).ask)
    assert asyncio.run(_all(full, Call("GET", "/live", {})))[0].status == 200
    for asked in (ASK, body):
        status, headers, content = sent(Replicas([app()], [Full("too many")]), PATH, asked)
        assert (status, headers["retry-after"]) == (429, "1")
        assert json.loads(content)["error"]["type"] == "rate_limit_error"
    status, _, content = sent(Replicas([app()], [Lost("gone")] * 99), PATH, ASK)
    assert status == 503 and b"gone" in content
    status, _, content = sent(Replicas([app()], []), PATH, {**ASK, "top_p": 2.0})
    assert status == 400 and b"top_p" in content
    status, _, content = sent(Replicas([app()], []), PATH, ASK, {"x-request-id": "a b"})
    assert status == 400 and b"X-Request-Id" in content
    [head, *parts] = asyncio.run(
        _all(make_ingress(Replicas([app()], []).ask), Call("PUT", "/", {}))
    )
    assert head.status == 404 and json.loads(b"".join(parts))["error"]["code"] == 404


async def _all(asked: Any, call: Call) -> list[Any]:
    return [part async for part in answers(asked, call)]


GENERATE = {"text": "def main(", "stream": True,
            "sampling_params": {"max_new_tokens": 30, "temperature": 1.0}}  # fmt: skip
GENERATES = {
    "one": {**GENERATE, "return_logprob": True},
    "n": {**GENERATE, "sampling_params": {**GENERATE["sampling_params"], "n": 2}},
    "several": {**GENERATE, "text": ["def main(", "import "], "rid": ["a", "b"],
                "sampling_params": [{"max_new_tokens": 20, "stop": ["e"]},
                                    {"max_new_tokens": 9, "repetition_penalty": 1.3}]},
    "schema": {**GENERATE, "sampling_params": {
        "max_new_tokens": 60, "json_schema": json.dumps(SCHEMA), "sampling_seed": 4}},
}  # fmt: skip


def grown(content: bytes) -> dict[int, list[Any]]:
    """The last chunk of each text of `/generate`; no chunk may have less than the one before."""
    blocks = content.decode().split("\n\n")
    assert blocks[-1] == "" and blocks[-2] == "data: [DONE]" and content.count(b"[DONE]") == 1
    made: dict[int, list[Any]] = {}
    for block in blocks[:-2]:
        chunk = json.loads(block.split("data: ", 1)[1])
        info = chunk["meta_info"]
        new = [chunk["text"], chunk["output_ids"], info["finish_reason"], info["id"],
               info.get("output_token_logprobs")]  # fmt: skip
        old = made.get(chunk.get("index", 0))
        assert old is None or old[2] is None
        assert old is None or (new[0].startswith(old[0]) and new[1][: len(old[1])] == old[1])
        made[chunk.get("index", 0)] = new
    return made


@pytest.mark.parametrize("kind", GENERATES)
def test_a_stream_of_generate_goes_on(kind):
    """SGLang's route: at any event or inside of one, with the seed and ids that were drawn."""
    body = GENERATES[kind]
    first = sent(Replicas([app()], []), "/generate", body, {"x-request-id": "mine"})[2]
    events = Events().add(first)
    name = events[0].decode().split("\n")[0][4:]
    ends = [sum(map(len, events[: n + 1])) for n in range(len(events))]
    for number, place in enumerate([ends[0], ends[0] + 9, ends[len(ends) // 2], ends[-2]]):
        # The client knows the first event of a stream, whose seed was drawn.
        dies: list[Any] = [place - ends[0]] if number % 2 else [max(place - ends[0], 1), 300]
        replicas = Replicas([app(), app(room=False)], dies)
        headers = {"x-request-id": "mine", "last-event-id": name}
        status, _, rest = sent(replicas, "/generate", body, headers)
        assert status == 200 and grown(events[0] + rest) == grown(first), (kind, place)
        assert len(replicas.calls) > 1 or place >= len(first) - ends[0]
    assert {one[3].split("_")[0] for one in grown(first).values()} <= {"mine", "a", "b"}
    # A client that has all tokens gets only the end, and an id of another request is refused.
    last = [one for one in events if one.startswith(b"id: ")][-1].decode().split("\n")[0][4:]
    other = [["def", "if"]] if isinstance(body["text"], list) else ["def"]
    for asked, status in ((body, 200), *(({**body, "text": text}, 409) for text in other)):
        made = sent(Replicas([app()], []), "/generate", asked, {"last-event-id": last})
        assert made[0] == status
        assert status != 200 or made[2] == b"data: [DONE]\n\n"


def test_replicas_that_end_one_after_the_other():
    """The wait is bounded: by the replicas that one request ends, and by a time without any."""
    for body in (ASK, {**ASK, "stream": False}):
        replicas = Replicas([app()], [Lost("killed")] * 99)
        status, _, content = sent(replicas, PATH, body, attempts=3)
        assert status == 503 and len(replicas.calls) == 3
        assert b"3 replicas in a row" in content and b"killed" in content
    # It ends as a stream where it had begun; a token between two deaths starts the count again.
    replicas = Replicas([app()], [900, Lost("killed"), Lost("killed")])
    status, _, content = sent(replicas, PATH, ASK, attempts=3)
    *_, error, done = content.decode().split("\n\n")[:-1]
    assert status == 200 and done == "data: [DONE]" and len(replicas.calls) == 3
    assert json.loads(error[6:])["error"]["code"] == 503 and "3 replicas" in error
    whole = told(sent(Replicas([app()], []), PATH, ASK)[2])
    replicas = Replicas([app()], [600, Lost("killed"), 900, Lost("killed")])
    assert told(sent(replicas, PATH, ASK, attempts=3)[2]) == whole and len(replicas.calls) == 5
    # While no replica serves, it waits for `patience` seconds.  A replica that serves may be slow.
    absent: list[int | Exception] = [Absent("none there")] * 99
    status, _, content = sent(Replicas([app()], absent), PATH, ASK, attempts=3)
    assert status == 503 and b"none there" in content

    async def slow(call: Call) -> AsyncGenerator[Head | bytes, None]:
        await asyncio.sleep(1.2)
        async for part in answers(app(), call):
            yield part

    for count in (1, 0):

        async def serving(count: int = count) -> int:
            return count

        ingress = make_ingress(slow, patience=0.3, serving=serving)
        [head, *rest] = asyncio.run(_all(ingress, Call("POST", PATH, {}, json.dumps(ASK).encode())))
        assert head.status == (200 if count else 503)
        assert count or b"none of them serves" in b"".join(rest)


@pytest.mark.parametrize("patience", [0.0, 0.3])
def test_an_answer_does_not_wait_for_a_look_at_the_replicas(patience):
    """The look takes longer than the answer, or finds a replica, so no time is too long."""

    async def slow(call: Call) -> AsyncGenerator[Head | bytes, None]:
        await asyncio.sleep(0.4)
        yield Head(200, {})

    async def serving() -> int:
        await asyncio.sleep(3600 * patience)
        return 1

    ingress = make_ingress(slow, patience=patience, serving=serving)
    asked = _all(ingress, Call("POST", PATH, {}, json.dumps(ASK).encode()))
    assert asyncio.run(asyncio.wait_for(asked, 60))[0].status == 200


def test_nobody_knows_so_nobody_serves(monkeypatch):
    monkeypatch.setattr(ingresses, "_LOOK", 0.1)

    async def never(call: Call) -> AsyncGenerator[Head | bytes, None]:
        await asyncio.sleep(3600)
        yield Head(200, {})

    async def serving() -> int:
        await asyncio.sleep(3600)
        return 1

    ingress = make_ingress(never, patience=0.1, serving=serving)
    asked = _all(ingress, Call("POST", PATH, {}, json.dumps(ASK).encode()))
    assert asyncio.run(asyncio.wait_for(asked, 60))[0].status == 503


@pytest.mark.parametrize("stops", [1, 10**9])
def test_a_replica_that_stops_while_it_writes_is_lost(stops: int, monkeypatch):
    """It says 503 after more than `patience` seconds: another one has as long, but not each."""
    monkeypatch.setattr(ingresses, "_LOOK", 0.05)
    calls = []

    async def ask(call: Call) -> AsyncGenerator[Head | bytes, None]:
        calls.append(call)
        await asyncio.sleep(0.15)
        yield Head(503 if len(calls) <= stops else 200, {})

    body = {**ASK, "stream": False}
    ingress = make_ingress(ask, patience=0.1, attempts=3)
    asked = _all(ingress, Call("POST", PATH, {}, json.dumps(body).encode()))
    [head, *rest] = asyncio.run(asyncio.wait_for(asked, 60))
    assert (head.status, len(calls)) == ((200, 2) if stops == 1 else (503, 3))
    assert stops == 1 or b"3 replicas in a row" in b"".join(rest)


def test_an_engine_that_stops_is_a_replica_that_dies(monkeypatch):
    """Its stream has an error of the status 503, after which another replica goes on."""
    target, _ = serving.models()
    sizes = {"capacity": 64, "chunk": 16, "constraint_size": (256, 160)}
    with Engine(target, {}, slots=1, **sizes) as short:
        run = short._device.run

        def slowly(steps: int, live: Any, least: int) -> None:
            time.sleep(0.05)  # so that it has not written all before it stops
            run(min(steps, 4), live, least)

        monkeypatch.setattr(short._device, "run", slowly)
        stopping = make_app(short, Limits())
        body = {**ASK, "speculation": {"drafter": "none"}, "max_tokens": 40, "ignore_eos": True}
        whole = told(sent(Replicas([app()], []), PATH, body)[2])

        class Stops(Replicas):
            async def _parts(self, call: Call, number: int) -> AsyncGenerator[Head | bytes, None]:
                count = 0
                async for part in super()._parts(call, number):
                    yield part
                    count += 1
                    if number == 0 and count == 2:
                        await asyncio.to_thread(short.close, False)

        replicas = Stops([stopping, app()], [])
        content = sent(replicas, PATH, body)[2]
        assert b'"error"' not in content, content[-600:]
        assert told(content) == whole
        assert len(replicas.calls) == 2


def test_a_client_that_goes_away_frees_its_slot():
    async def leave() -> None:
        ingress = make_ingress(Replicas([app()], []).ask)
        body = {**ASK, "max_tokens": 100, "ignore_eos": True, "n": 3}
        parts = answers(ingress, Call("POST", PATH, {}, json.dumps(body).encode()))
        await anext(parts)
        await anext(parts)
        await parts.aclose()

    cancelled = engine().load().cancelled
    asyncio.run(leave())
    for _ in range(200):
        load = engine().load()
        if load.running == load.waiting == 0:
            break
        asyncio.run(asyncio.sleep(0.05))
    assert (load.running, load.waiting) == (0, 0) and load.cancelled > cancelled


def test_a_client_that_goes_away_while_its_request_is_submitted(monkeypatch):
    """Its slot is free at once: the handle that a thread still makes is not lost."""
    one, submit = engine(), engine().submit

    def slowly(*given: Any, **named: Any) -> Any:
        time.sleep(0.3)
        return submit(*given, **named)

    monkeypatch.setattr(one, "submit", slowly)
    body = {**ASK, "max_tokens": 150, "ignore_eos": True, "speculation": {"drafter": "none"}}

    async def leave() -> None:
        parts = answers(app(), Call("POST", PATH, {}, json.dumps(body).encode()))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(parts), 0.1)
        await parts.aclose()

    cancelled = one.load().cancelled
    asyncio.run(leave())
    for _ in range(200):
        if one.load().cancelled > cancelled:
            break
        time.sleep(0.01)
    assert one.load().cancelled == cancelled + 1 and one.load().running == 0


@pytest.mark.parametrize(
    ("fields", "word"),
    [({"replicas": 0}, "replicas=0"), ({"most": 1}, "most=1"), ({"router": "any"}, "router='any'"),
     ({"drain": -1}, "drain=-1"), ({"cpus": "2"}, "cpus='2'"), ({"engine": 3}, "engine=3"),
     ({"queue": 0}, "queue=0"), ({"attempts": 0}, "attempts=0"),
     ({"resources": {"CPU": 1}}, "CPU is none of them")],
)  # fmt: skip
def test_layouts_that_cannot_be(fields, word):
    made: dict[str, Any] = {"engine": engine, "replicas": 2, **fields}
    with pytest.raises(ValueError, match=word):
        Fleet(**made)


def test_prompts_of_routers():
    """Never empty, since Ray's router divides by the length."""
    kinds: dict[str, Callable[[], object]] = {
        "def": lambda: {"prompt": "def"}, "[1, 2]": lambda: {"prompt": [1, 2]},
        "-": lambda: {"prompt": ""}, '[{"role"': lambda: CHAT,
    }  # fmt: skip
    for start, make in kinds.items():
        assert prompt_of(make()).startswith(start)
    assert prompt_of(None) == "-" and len(prompt_of({"prompt": "a" * 10**6})) == 4096


def test_a_fleet_that_stops_finishes_its_streams():
    """What has begun goes on; what is new gets 503, and so does the probe of readiness."""
    whole = told(sent(Replicas([app()], []), PATH, ASK)[2])
    ingress = make_ingress(Replicas([app()], []).ask)
    state = ingress.state.ingress

    async def all_of_it() -> None:
        # A server runs this part of the application from its start to its end.
        stopping, told_us = asyncio.Event(), asyncio.Queue()

        async def receive() -> Any:
            if told_us.empty():
                return {"type": "lifespan.startup"}
            await stopping.wait()
            return {"type": "lifespan.shutdown"}

        scope = {"type": "lifespan", "asgi": {"version": "3.0"}}
        lifespan = asyncio.create_task(ingress(scope, receive, told_us.put))
        while told_us.empty():
            await asyncio.sleep(0)
        assert state.running == 0
        call = Call("POST", PATH, {}, json.dumps(ASK).encode())
        begun = answers(ingress, call)
        first = [await anext(begun), await anext(begun)]
        assert state.running == 1
        state.draining = True
        for new in (call, Call("GET", "/ready", {})):
            head = await anext(answers(ingress, new))
            assert isinstance(head, Head) and head.status == 503
        rest = [part async for part in begun]
        content = b"".join(x for x in [*first, *rest] if isinstance(x, bytes))
        assert told(content) == whole
        assert state.running == 0
        stopping.set()
        await lifespan

    asyncio.run(all_of_it())
