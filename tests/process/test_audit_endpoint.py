"""Audits of foreign servers, each a small HTTP server of this process."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time

import command_line
import numpy as np
import pytest

import specjax
from specjax.auditing import Endpoint, Plan, audit_endpoint
from specjax.auditing.foreign import cells_of, two_samples

PROMPTS = ["def ", "import os\n", "class Stack:\n", "The "]
TINY = command_line.TINY / "target"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers completions with `server.answer(body)`, which returns a status and an object."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body["authorization"] = self.headers.get("Authorization")
        status, answer = self.server.answer(self.path, body)
        raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(raw)

    def log_message(self, *words):
        """Nothing is logged."""


@contextlib.contextmanager
def served(answer):
    """The address of a server that answers so."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.answer = answer
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def completion(text):
    return 200, {"choices": [{"text": text}]}


class Letters:
    """Writes letters by chance, or the likeliest ones; `bias` moves the first letter."""

    def __init__(self, bias=0.0, greedy="abcdefgh"):
        self.weights = np.array([0.4 + bias, 0.3 - bias, 0.2, 0.1])
        self.greedy = greedy

    def __call__(self, path, body):
        assert path == "/v1/completions"
        if body["temperature"] == 0:
            return completion(self.greedy[: body["max_tokens"]])
        random = np.random.default_rng(
            [body["seed"], len(body["prompt"]), int(self.weights[0] * 99)]
        )
        return completion("".join(random.choice(list("abcd"), body["max_tokens"], p=self.weights)))


def compared(answer, baseline, samples=1024):
    with served(answer) as url, served(baseline) as other:
        plan = Plan(PROMPTS, 8, samples, 2)
        return audit_endpoint(Endpoint(url, "m"), Endpoint(other, "m"), plan)


def test_equal_servers_pass():
    report = compared(Letters(), Letters())
    assert report.passed, str(report)
    assert [check.name for check in report.checks] == ["repeat", "greedy", "distribution"]
    (check,) = report.distributions
    assert check.samples == 1024
    assert 0 < check.detectable < 0.25
    assert "would have been found with probability 0.99" in str(report)


def test_a_biased_server_fails():
    report = compared(Letters(bias=0.15), Letters())
    assert report.failures == ("distribution",)
    assert report.distributions[0].total_variation > 0.1


def fixed(path, body):
    """Ignores the temperature, as `transformers serve` does for a folder without `do_sample`."""
    return completion("abcdefgh"[: body["max_tokens"]])


def test_a_server_that_does_not_sample_is_named():
    for sides, name in (((fixed, Letters()), "server"), ((Letters(), fixed), "baseline")):
        report = compared(*sides, samples=128)
        assert report.failures == ("distribution",)
        assert f"the {name} wrote one text for each prompt: switch sampling on" in str(report)
    with pytest.raises(ValueError, match=r"one text for each prompt, 32 times at temperature 1"):
        compared(fixed, fixed, samples=128)


def test_another_greedy_text_fails():
    report = compared(Letters(greedy="abcdXfgh"), Letters())
    assert report.failures == ("greedy",)
    assert "differs from character 4 on: 'Xfgh', the baseline has 'efgh'" in str(report)


def test_texts_that_change_with_the_load_are_labelled():
    """A server that differs from itself is labelled, and not accused."""
    calls, lock = [0], threading.Lock()

    def unstable(path, body):
        with lock:
            calls[0] += 1
            crowded = calls[0] > len(PROMPTS)  # each was asked alone before
        return completion("abce" if crowded and body["prompt"] == PROMPTS[0] else "abcd")

    with served(unstable) as url:
        report = audit_endpoint(Endpoint(url, "m"), None, Plan(PROMPTS))
    (check,) = report.checks
    assert check.verdict == "float noise?"
    assert report.passed


def test_clean_servers_are_not_accused():
    """Two samples of one distribution, 200 times, without a server."""
    random, accused = np.random.default_rng(0), 0
    for _ in range(200):
        sides = [
            [(n % 4, *random.choice(list("abcd"), 2, p=[0.4, 0.3, 0.2, 0.1])) for n in range(512)]
            for _ in range(2)
        ]
        accused += two_samples(*sides, 1e-3).p_value < 1e-3
    assert accused <= 2


def test_cells_are_the_longest_frequent_prefixes():
    texts = [(0, "a", "b")] * 10 + [(0, "a", "c")] * 3 + [(0, "d", "e")] * 2 + [(1, "a", "b")] * 4
    assert cells_of(texts) == {
        (0, "a", "b"): (0, "a", "b"),
        (0, "a", "c"): (0,),
        (0, "d", "e"): (0,),
        (1, "a", "b"): (1,),
    }


ANSWERS = {
    "404": ((404, {"error": "no model m"}), "answered 404: .*no model m.*correct the address"),
    "401": ((401, {}), "answered 401.*--api-key-variable"),
    "429": ((429, {}), "answered 429.*lower the concurrency"),
    "500": ((500, {}), "answered 500.*server's log"),
    "no JSON": ((200, b"<html>"), "'<html>' instead of a completion"),
    "no choices": ((200, {"choices": []}), "instead of a completion"),
    "no text": ((200, {"choices": [{"text": None}]}), "instead of a completion"),
    "nothing written": (completion(""), "every prompt with an empty text"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_wrong_answers_are_named(name):
    answer, message = ANSWERS[name]
    with served(lambda path, body: answer) as url, pytest.raises(ValueError, match=message):
        audit_endpoint(Endpoint(url, "m"), None, Plan(PROMPTS))


def test_a_refused_connection_and_a_slow_server_are_named():
    with served(Letters()) as url:
        pass
    with pytest.raises(ValueError, match=r"cannot be reached .*start the server"):
        audit_endpoint(Endpoint(url, "m"), None, Plan(PROMPTS))

    def slow(path, body):
        time.sleep(0.5)
        return completion("a")

    with served(slow) as url, pytest.raises(ValueError, match=r"did not answer within 0\.1 s"):
        audit_endpoint(Endpoint(url, "m", timeout=0.1), None, Plan(PROMPTS))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Endpoint("localhost:8000", "m"), "url=localhost:8000 is not an address"),
        (lambda: Endpoint("http://x/v1", "m", timeout=0), "timeout=0"),
        (lambda: Endpoint("http://x/v1", "m", concurrency=0), "concurrency=0"),
        (lambda: Plan([]), "at least one prompt"),
        (lambda: Plan(["a", ""]), "none may be empty"),
        (lambda: Plan(["a"], samples=0), "samples=0"),
        (
            lambda: Plan(["a"], temperature=0.0),
            "temperature=0.0; it must be greater than 0, since 0 draws nothing",
        ),
        (lambda: Plan(["a"], top_p=1.5), "top_p=1.5"),
        (lambda: Plan(["a"], significance=1.0), "significance=1.0"),
    ],
)
def test_bad_plans_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class Shipped:
    """Serves the tiny checkpoint, batch by batch; `temperature` replaces that of the request."""

    def __init__(self, temperature=None):
        self.target, self.temperature = specjax.load(TINY), temperature
        self.lock, self.keys = threading.Lock(), set()

    def __call__(self, path, body):
        self.keys.add(body["authorization"])
        heat = body["temperature"] and (self.temperature or body["temperature"])
        with self.lock:
            out = specjax.generate(
                self.target, [body["prompt"]], proposer="ngram", num_drafts=2, seed=[body["seed"]],
                temperature=heat, max_new_tokens=body["max_tokens"],
            )  # fmt: skip
        return completion(out.text[0])


ASKED = ["--model", "tiny", "--target", TINY, "--samples", 256, "--max-new-tokens", 12]


def test_the_command_passes_the_shipped_model(capsys, monkeypatch, tmp_path):
    """The model served with speculation is that of the folder; the report is also a file."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    shipped, file = Shipped(), tmp_path / "report.json"
    with served(shipped) as url:
        out = command_line.run(capsys, "audit", "--url", url, *ASKED, "--json", file).out
    assert "passed: no claim is broken" in out
    assert "secret" not in out
    assert shipped.keys == {"Bearer secret"}
    report = json.loads(file.read_text())
    assert report["passed"] is True
    assert [check["name"] for check in report["checks"]] == ["repeat", "greedy", "distribution"]
    assert report["checks"][-1]["samples"] == 256


def test_the_command_fails_a_server_that_samples_too_hot(capsys):
    with served(Shipped(temperature=3.0)) as url, pytest.raises(SystemExit) as exit_:
        command_line.run(capsys, "audit", "--url", url, *ASKED)
    assert exit_.value.code == 1
    assert "FAILED: distribution" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "http://127.0.0.1:1/v1"], ["--url needs --model"]),
        (["--url", "nowhere", "--model", "m"], ["url=nowhere is not an address"]),
        (["--url", "http://127.0.0.1:1/v1", "--model", "m"], ["cannot be reached", "start the"]),
        (
            ["--url", "http://127.0.0.1:1/v1", "--model", "m", "--top-k", "3"],
            ["--top-k is not used with --url"],
        ),
        (
            [
                "--url",
                "http://x/v1",
                "--model",
                "m",
                "--baseline-url",
                "http://y/v1",
                *command_line.PAIR[:2],
            ],
            ["either --baseline-url or --target"],
        ),
        (["--model", "m"], ["--model is used with --url only"]),
        (["--stop", "x"], ["--stop", "leave it out"]),
    ],
)
def test_the_command_refuses_mistakes(capsys, arguments, words):
    message = command_line.failure(capsys, "audit", *arguments)
    assert message.count("\n") == 1
    for word in words:
        assert word in message
