"""Streams of a fleet whose replicas are killed, each of which must be the stream of one engine.

    PYTHONPATH=tests python -m tests.fleets --requests 2000 --replicas 3 --kill-every 20 --seed 1
    PYTHONPATH=tests python -m tests.fleets --requests 100 --model tables --kill-every 5
    PYTHONPATH=tests python -m tests.fleets --requests 20 --model tables --plant weights

The requests come from several threads: completions and chats with every drafter, SGLang's
`/generate`, schemas, penalties, stops, three texts at once, and prompts that share their
beginnings.  SIGKILL ends one replica after the other.  What each client got is compared with the
answer of an engine that nobody disturbs: text, tokens and reason of each choice.  A gap, a repeat
or another token is a difference.

`--plant weights` gives each replica weights of its own: a stream may end with an error then, and
must never have another text.  It needs the extra `ray`.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import concurrent.futures
import dataclasses
import functools
import http.client
import itertools
import json
import os
import pathlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import load
import numpy as np
import serving

from specjax.serve import Engine, fleet
from specjax.serve.fleet.call import answers
from specjax.serve.http import Limits, make_app

HERE = pathlib.Path(__file__).parent
SCHEMA = {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"], "additionalProperties": False,
}  # fmt: skip
SLOTS = 4
DRAFTERS = ("none", "lookup", "draft", "tree", "medusa", "lookup+draft", "lookup+medusa")


def engine(model: str, planted: bool = False) -> Engine:
    """The engine of a replica; with planted weights each process has others."""
    if model == "tables":
        target, drafters = serving.models()[0], serving.drafters()
    else:
        target, drafters = load.models()[0], load.drafters()
        target = dataclasses.replace(
            target, files={**target.files, "chat_template.jinja": serving.TEMPLATE}
        )
    if planted:
        rng = np.random.default_rng(os.getpid())
        changed = jax.tree.map(
            lambda x: x * (1 + 0.3 * rng.standard_normal(x.shape, np.float32)).astype(x.dtype)
            if x.dtype == np.float32 else x, target.params,
        )  # fmt: skip
        target = dataclasses.replace(target, params=changed)
        drafters = {"lookup": drafters["lookup"]}
    return Engine(
        target, drafters, slots=SLOTS, capacity=load.CAPACITY, chunk=load.CHUNK,
        constraint_size=(256, 160), expected=4, logprobs=load.LOGPROBS,
    )  # fmt: skip


@functools.cache
def words() -> str:
    return (HERE.parent / "specjax" / "tree.py").read_text()


def request(seed: int, planted: bool = False) -> tuple[str, dict[str, Any]]:
    """The path and the body of the request of a seed."""
    drawn, source = np.random.default_rng(seed), words()
    start = 300 * int(drawn.integers(3)) if drawn.random() < 0.4 else int(drawn.integers(4000))
    prompt = source[start : start + int(drawn.integers(4, 90))]
    drafter = "lookup" if planted else str(drawn.choice(DRAFTERS))
    speculation: dict[str, Any] = {"drafter": drafter}
    if "medusa" in drafter:
        speculation["adapter"] = str(drawn.choice(["one", "two"]))
    body: dict[str, Any] = {
        "max_tokens": int(drawn.integers(30, 90)), "seed": int(drawn.integers(2**32)),
        "temperature": float(drawn.choice([0.0, 0.7, 1.0])), "top_p": 0.95,
        "n": int(drawn.choice([1, 1, 3])), "speculation": speculation, "ignore_eos": True,
    }  # fmt: skip
    kind = drawn.integers(6)
    if kind == 0:
        form = {"name": "made", "schema": SCHEMA}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
        body["ignore_eos"] = False
    elif kind == 1:
        body |= {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.1}
    elif kind == 2:
        body["stop"] = ["e\n", "def", "\n\n"]
    if drawn.random() < 0.15:
        return "/generate", generated(prompt, body)
    if drawn.random() < 0.3:
        body["messages"] = [{"role": "user", "content": prompt}]
        return "/v1/chat/completions", body
    body["prompt"] = prompt
    return "/v1/completions", body


def generated(prompt: str, body: dict[str, Any]) -> dict[str, Any]:
    """The same request for SGLang's route, where the drafter is the engine's."""
    same = ("temperature", "top_p", "n", "ignore_eos", "stop", "repetition_penalty",
            "presence_penalty", "frequency_penalty")  # fmt: skip
    sampling = {name: body[name] for name in same if name in body}
    sampling |= {"max_new_tokens": body["max_tokens"], "sampling_seed": body["seed"]}
    if "response_format" in body:
        sampling["json_schema"] = json.dumps(SCHEMA)
    return {"text": prompt, "sampling_params": sampling}


def grown(chunks: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The texts of a stream of `/generate`, of which no chunk has less than the one before."""
    made: dict[int, dict[str, Any]] = {}
    assert len({chunk["meta_info"]["id"] for chunk in chunks}) == 1, "a client sees several answers"
    for chunk in chunks:
        old = made.get(chunk.get("index", 0), {"text": "", "output_ids": []})
        assert chunk["text"].startswith(old["text"]), "a text has changed"
        assert chunk["output_ids"][: len(old["output_ids"])] == old["output_ids"], "tokens changed"
        made[chunk.get("index", 0)] = chunk
    return told([made[index] for index in sorted(made)])


def told(choices: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Text, tokens and reason of each choice of an answer."""
    if "meta_info" in choices[0]:
        return [
            (one["text"], one["output_ids"], one["meta_info"]["finish_reason"]) for one in choices
        ]
    return [
        (one["message"]["content"] if "message" in one else one["text"], one["token_ids"],
         one["finish_reason"])
        for one in choices
    ]  # fmt: skip


class Broken(Exception):
    """Raised if a stream ends with an error."""


def streamed(port: int, path: str, body: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The same of a stream, as its client puts it together."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    own = {} if path == "/generate" else {"stream_options": {"include_usage": True}}
    content = json.dumps({**body, "stream": True, **own})
    connection.request("POST", path, content)
    answer = connection.getresponse()
    lines = (line.decode().rstrip("\n") for line in answer)
    if answer.status != 200:
        raise Broken(f"status {answer.status}: {next(lines)}")
    data = [line[6:] for line in lines if line.startswith("data: ")]
    connection.close()
    if data.count("[DONE]") != 1 or data[-1] != "[DONE]":
        raise Broken(f"a stream ends with {data[-1:]}")
    chunks = [json.loads(line) for line in data[:-1]]
    errors = [chunk["error"] for chunk in chunks if "error" in chunk]
    if errors:
        raise Broken(str(errors[0]["code"]))
    if path == "/generate":
        return grown(chunks)
    heads = {(chunk["id"], chunk["created"], chunk["system_fingerprint"]) for chunk in chunks}
    assert len(heads) == 1, f"a client sees {len(heads)} answers"
    assert sum("usage" in chunk for chunk in chunks) == 1, "the usage did not come once"
    texts = [""] * body["n"]
    tokens: list[list[int]] = [[] for _ in texts]
    ends: list[list[str]] = [[] for _ in texts]
    roles = 0
    for one in (one for chunk in chunks for one in chunk["choices"]):
        index, delta = one["index"], one.get("delta", {})
        roles += "role" in delta
        texts[index] += one.get("text", delta.get("content") or "")
        tokens[index] += one.get("token_ids", [])
        ends[index] += [one["finish_reason"]] if one["finish_reason"] else []
    assert roles == (body["n"] if path.startswith("/v1/chat") else 0), "a role came twice, or never"
    assert all(len(one) == 1 for one in ends), "a text did not end once"
    return [*zip(texts, tokens, [one[0] for one in ends], strict=True)]


def alone(made: Engine, asked: list[tuple[str, dict[str, Any]]]) -> list[list[tuple[Any, ...]]]:
    """What an engine answers that nobody disturbs."""
    app, limit = make_app(made, Limits()), asyncio.Semaphore(12)

    async def one(path: str, body: dict[str, Any]) -> list[tuple[Any, ...]]:
        async with limit:
            call = fleet.Call("POST", path, {}, json.dumps(body).encode())
            head, *parts = [part async for part in answers(app, call)]
            assert head[0] == 200, parts
            answer = json.loads(b"".join(parts))
            if path == "/generate":
                return told(answer if isinstance(answer, list) else [answer])
            return told(answer["choices"])

    async def every() -> list[list[tuple[Any, ...]]]:
        return await asyncio.gather(*(one(path, body) for path, body in asked))

    return asyncio.run(every())


_STARTING = ("initialize", "__init__")
"""Parts of the names of processes that do not serve yet."""


def own_processes(*names: str) -> list[int]:
    """The processes with these beginnings of names that this process has started."""
    parents, found = {}, []
    for folder in pathlib.Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                name = (folder / "cmdline").read_bytes().decode()
            except OSError:
                continue
            parents[int(folder.name)] = int(parent)
            if name.startswith(names) and not any(word in name for word in _STARTING):
                found.append(int(folder.name))

    def line(number: int) -> Iterator[int]:
        while number in parents:
            yield number
            number = parents[number]

    return [number for number in found if os.getpid() in line(number)]


def killing(every: float, ended: threading.Event, counts: collections.Counter[str]) -> None:
    """Kills one replica after the other, if another one is there."""
    for turn in itertools.count():
        if ended.wait(every):
            return
        there = sorted(own_processes("ray::ServeReplica:specjax:replicas"))
        if len(there) > 1:
            os.kill(there[turn % len(there)], signal.SIGKILL)
            counts["replicas killed"] += 1


def campaign(
    *, requests: int, replicas: int, kill_every: float, seed: int = 0, model: str = "tiny",
    threads: int = 24, router: str = "prefix", planted: bool = False, port: int = 8211,
    rounds: int = 1,
) -> tuple[collections.Counter[str], list[str]]:  # fmt: skip
    """Runs the streams, and returns counts and differences.

    Args:
      requests: in a round.
      rounds: at most; the next one begins if no stream has lost its replica yet.
    """
    asked: list[tuple[str, dict[str, Any]]] = []
    got: list[list[tuple[Any, ...]] | Exception] = []
    layout = fleet.Fleet(
        functools.partial(engine, model, planted), replicas=replicas, slots=SLOTS, queue=1000,
        cpus=0.1, router=router, patience=30 if planted else 300,
    )  # fmt: skip
    counts, ended = collections.Counter[str](), threading.Event()

    def one(given: tuple[str, dict[str, Any]]) -> list[tuple[Any, ...]] | Exception:
        try:
            return streamed(port, *given)
        except (Broken, OSError, http.client.HTTPException) as error:
            return error

    # The processes of Ray import the engine's function from here.
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    began = time.perf_counter()
    with fleet.running(layout, port=port) as _:
        up = time.perf_counter()
        print(f"{replicas} replicas after {up - began:.0f} s", flush=True)
        killer = threading.Thread(target=killing, args=[kill_every, ended, counts])
        killer.start()
        figures: dict[str, int] = {}
        for _ in range(rounds):
            first = (seed << 32) + len(asked)
            new = [request(first + number, planted) for number in range(requests)]
            with concurrent.futures.ThreadPoolExecutor(threads) as pool:
                got += pool.map(one, new)
            asked += new
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", "/fleet")
            figures = json.loads(connection.getresponse().read())
            if figures["lost" if planted else "resumed"]:
                break
        ended.set()
        killer.join()
        counts["seconds"] = round(time.perf_counter() - up)
        counts.update(figures)
    wrong = []
    with engine(model, planted) as made:
        for number, (given, mine, own) in enumerate(
            zip(asked, got, [None] * len(asked) if planted else alone(made, asked), strict=True)
        ):
            counts["streams"] += 1
            if isinstance(mine, Exception):
                counts["streams that ended with an error"] += 1
                if not planted:
                    wrong.append(f"request {number} ended with {mine!r}: {given}")
                continue
            counts["texts"] += len(mine)
            counts["tokens"] += sum(len(tokens) for _, tokens, _ in mine)
            if own is not None and mine != own:
                wrong.append(f"request {number} {given}:\n  {mine}\n  {own}")
    return counts, wrong


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--kill-every", type=float, default=20.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=24)
    parser.add_argument("--model", choices=["tiny", "tables"], default="tiny")
    parser.add_argument("--router", choices=["prefix", "spread"], default="prefix")
    parser.add_argument("--plant", choices=["weights"])
    parser.add_argument("--port", type=int, default=8211)
    asked = vars(parser.parse_args(argv))
    planted = asked.pop("plant") is not None
    counts, wrong = campaign(**asked, planted=planted)
    for line in wrong[:20]:
        print(line)
    print("| | |\n|---|---|")
    for name, number in sorted(counts.items()):
        print(f"| {name} | {number} |")
    print(f"| differences | {len(wrong)} |")
    assert not wrong, f"{len(wrong)} streams are not those of one engine"
    assert not planted or counts["streams that ended with an error"], "nobody saw other weights"
    assert planted or counts["resumed"], "no stream lost its replica: kill more often"


if __name__ == "__main__":
    main()
