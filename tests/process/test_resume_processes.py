"""A stream whose server is killed goes on at another server, as a user of the command sees it."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from command_line import ROOT
from serving import send

for package in ("starlette", "uvicorn", "pydantic", "sse_starlette", "prometheus_client"):
    pytest.importorskip(package)

TINY = ROOT / "checkpoints" / "tiny"
ASK = {"prompt": "def main(", "max_tokens": 200, "temperature": 0.9, "ignore_eos": True,
       "presence_penalty": 0.2, "n": 2, "stream": True}  # fmt: skip


def begin(*more: str) -> subprocess.Popen:
    """Starts a server with the shipped target."""
    words = ["--target", str(TINY / "target"), "--capacity", "240", "--slots", "2", "--port", "0",
             "--chunk", "32", "--logprobs", "-1", "--constraint-size", "0", "0", *more]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "specjax", "serve", *words], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def port_of(process: subprocess.Popen) -> int:
    """Waits for a server, and returns its port."""
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    assert line.startswith("serving target"), line + process.stderr.read()
    return int(line.rsplit(":", 1)[1])


def stop(process: subprocess.Popen) -> None:
    process.kill()
    process.wait(30)
    for pipe in (process.stdout, process.stderr):
        assert pipe is not None
        pipe.close()


def events(port: int, last: str | None = None) -> Iterator[tuple[str | None, Any]]:
    """Yields the id and the data of each event, until the connection breaks."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {} if last is None else {"Last-Event-ID": last}
    connection.request("POST", "/v1/completions", json.dumps(ASK), headers)
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    name = None
    try:
        while line := answer.readline().decode():
            if line.startswith("id: "):
                name = line[4:].strip()
            elif line.startswith("data: "):
                data = line[6:].strip()
                yield name, data if data == "[DONE]" else json.loads(data)
                name = None
    except (OSError, http.client.HTTPException):
        return
    finally:
        connection.close()


def texts(got: list[tuple[str | None, Any]]) -> list[tuple[str, list[int], str | None]]:
    made: list[tuple[str, list[int], str | None]] = [("", [], None)] * 2
    for _, data in got:
        for choice in [] if data == "[DONE]" else data["choices"]:
            text, tokens, end = made[choice["index"]]
            made[choice["index"]] = (
                text + choice["text"], tokens + choice.get("token_ids", []),
                choice["finish_reason"] or end,
            )  # fmt: skip
    return made


def test_a_stream_survives_its_server():
    """The first server is killed; the second has other drafters and slots.  The request has no
    seed: the id brings it."""
    first, second = begin("--default", "lookup"), begin("--slots", "3", "--no-lookup")
    try:
        port, other = port_of(first), port_of(second)
        got: list[tuple[str | None, Any]] = []
        for name, data in events(port):
            got.append((name, data))
            if sum(len(tokens) for _, tokens, _ in texts(got)) > 40:
                first.kill()
        named = [n for n, (name, _) in enumerate(got) if name is not None]
        assert got[-1][1] != "[DONE]" and named
        got = got[: named[-1] + 1]
        last = got[-1][0]
        assert last is not None
        rest = list(events(other, last))
        assert rest[-1][1] == "[DONE]"
        whole = texts([*got, *rest])
        assert [len(tokens) for _, tokens, _ in whole] == [200, 200]
        seed = rest[-2][1]["metrics"]["seed"]
        body = {**ASK, "stream": False, "seed": seed}
        status, _, content = send(other, "POST", "/v1/completions", body)
        assert status == 200
        alone = [(c["text"], c["token_ids"], c["finish_reason"])
                 for c in json.loads(content)["choices"]]  # fmt: skip
        assert whole == alone
    finally:
        stop(first)
        stop(second)
