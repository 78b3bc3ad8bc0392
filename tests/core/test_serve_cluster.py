"""What Kubernetes and its gateways ask of a server: probes, ids, aborts, metrics, traces."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
import serving
from serving import events, post, running, send

ASK = {"prompt": "def main(", "max_tokens": 12, "seed": 3, "temperature": 0.8}
LONG = {**ASK, "max_tokens": 150, "ignore_eos": True}
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def served():
    with running(serving.engine(), admin=True) as (server, port):
        yield server, port


def test_live_while_it_drains(served):
    """Ready no more, but alive, or the drain would be ended."""
    server, port = served
    statuses = {path: send(port, "GET", path)[0] for path in ("/live", "/ready", "/health")}
    assert statuses == {"/live": 200, "/ready": 200, "/health": 200}
    server.service.draining = True
    try:
        statuses = {path: send(port, "GET", path)[0] for path in ("/live", "/ready", "/health")}
        assert statuses == {"/live": 200, "/ready": 503, "/health": 503}
        assert send(port, "POST", PATH, ASK)[0] == 503
    finally:
        server.service.draining = False


def test_request_ids(served):
    """Sent back in the header and in the answer, with errors too; one is made if none was sent."""
    _, port = served
    for body in (ASK, {**ASK, "stream": True}):
        status, headers, content = send(port, "POST", PATH, body, **{"X-Request-Id": "abc/1"})
        assert (status, headers["x-request-id"]) == (200, "abc/1")
        first = events(content)[0] if body.get("stream") else json.loads(content)
        assert first["id"] == "cmpl-abc/1"
    status, headers, _ = send(port, "POST", PATH, {**ASK, "top_p": 3.0}, **{"X-Request-Id": "e"})
    assert (status, headers["x-request-id"]) == (400, "e")
    made = [send(port, "GET", "/v1/models")[1]["x-request-id"] for _ in range(2)]
    assert len(set(made)) == 2
    status, _, content = send(port, "POST", PATH, ASK, **{"X-Request-Id": "a b"})
    assert status == 400 and b"X-Request-Id 'a b'" in content


def test_a_request_is_aborted_by_its_id(served):
    """Of OpenAI's API, streamed and whole; the neighbour goes on, and no id is kept."""
    server, port = served
    answers: dict[str, Any] = {}

    def ask(name: str, stream: bool) -> None:
        body = {**LONG, "stream": stream, "speculation": {"drafter": "none"}}
        answers[name] = send(port, "POST", PATH, body, **{"X-Request-Id": name})

    threads = [
        threading.Thread(target=ask, args=given)
        for given in (("ended-1", True), ("ended-2", False), ("other", False))
    ]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 20
    while len(server.service.rids) < 3 and time.monotonic() < until:
        time.sleep(0.001)
    post(port, "/abort_request", {"rid": "ended"})
    for thread in threads:
        thread.join(60)
    streamed = events(answers["ended-1"][2])
    reasons = [x["choices"][0]["finish_reason"] for x in streamed[:-1] if x["choices"]]
    whole, other = (json.loads(answers[name][2]) for name in ("ended-2", "other"))
    assert reasons[-1] == whole["choices"][0]["finish_reason"] == "abort"
    assert other["choices"][0]["finish_reason"] == "length"
    assert server.service.rids == {}


def test_metrics_of_pickers(served):
    """The names and labels by which gateways choose a pod, and values that follow the load."""
    server, port = served
    lines = send(port, "GET", "/metrics")[2].decode().splitlines()
    chunk, room = server.service.engine.blocks.size, server.service.engine.blocks.count
    info = [line for line in lines if line.startswith("vllm:cache_config_info{")]
    assert len(info) == 1 and info[0].endswith("} 1.0")
    assert f'block_size="{chunk}"' in info[0] and f'num_gpu_blocks="{room}"' in info[0]
    assert 'vllm:kv_cache_usage_perc{model_name="target"} 0.0' in lines
    engine, seen = server.service.engine, []
    handles = [server.service.engine.submit(_request()) for _ in range(3)]
    while not all(handle.done() for handle in handles):
        seen.append(engine.load().cache_share)
        time.sleep(0.001)
    assert 0 < max(seen) <= 1 and engine.load().cache_share == 0
    # Three rows of at most 9 + 150 tokens in slots of 192 each.
    assert max(seen) <= 3 * 160 / (chunk * room)


def _request() -> Any:
    import specjax

    return specjax.Request(
        prompts="def main(", max_new_tokens=150, eos=[], temperature=1.0, proposer="none"
    )


def test_traces(served):
    """A span for each text, inside the trace of the client."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import (  # pyright: ignore
        InMemorySpanExporter,
    )

    from specjax.serve.http.tracing import Tracing

    server, port = served
    exporter = InMemorySpanExporter()
    server.service.tracing = Tracing(None, "target", exporter)
    try:
        trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
        sent = {"traceparent": f"00-{trace}-{parent}-01", "X-Request-Id": "traced"}
        answer = json.loads(send(port, "POST", PATH, {**ASK, "n": 2}, **sent)[2])
        send(port, "POST", PATH, {**ASK, "stream": True})
    finally:
        server.service.tracing.close()
        server.service.tracing = None
    first, second, alone = exporter.get_finished_spans()
    for span, choice in zip((first, second), answer["choices"], strict=True):
        assert f"{span.context.trace_id:032x}" == trace and f"{span.parent.span_id:016x}" == parent
        assert span.attributes["gen_ai.usage.output_tokens"] == len(choice["token_ids"])
        assert span.attributes["gen_ai.response.id"] == "traced"
        names = [event.name for event in span.events]
        times = [span.start_time, *(event.timestamp for event in span.events), span.end_time]
        assert names == ["prompt", "first token"] and times == sorted(times)
        assert abs(span.end_time / 1e9 - time.time()) < 60
    assert alone.parent is None


def test_traces_need_their_packages(monkeypatch):
    import builtins

    from specjax.serve.http.tracing import Tracing

    real = builtins.__import__

    def without(name: str, *given: Any, **named: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name, name=name)
        return real(name, *given, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"traces need opentelemetry.*otel"):
        Tracing("http://localhost:4318", "target")
