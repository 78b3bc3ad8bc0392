"""The server, once, from end to end with the shipped tiny pair."""

import pytest
import serving
from command_line import TINY

import specjax
from specjax.serve import Engine

for package in ("starlette", "uvicorn", "pydantic", "sse_starlette", "prometheus_client"):
    pytest.importorskip(package)


def test_server():
    """A completion, whole and streamed, is the text of `generate`, and drafts were accepted."""
    target, draft = (specjax.load(TINY / name) for name in ("target", "draft"))
    drafter = specjax.make_drafter(target, draft, num_drafts=3)
    options = {"max_new_tokens": 12, "temperature": 0.8, "seed": 3, "proposer": "none"}
    wanted = specjax.generate(target, "def main(", **options)
    asked = {"prompt": "def main(", "max_tokens": 12, "seed": 3, "temperature": 0.8}
    with (
        Engine(target, {"draft": drafter}, slots=1, capacity=64, chunk=32) as made,
        serving.running(made) as (_, port),
    ):
        answer = serving.post(port, "/v1/completions", asked)
        content = serving.send(port, "POST", "/v1/completions", {**asked, "stream": True})[2]
    assert answer["choices"][0]["text"] == wanted.text[0]
    figures = answer["metrics"]["speculative_decoding"]
    assert figures["num_accepted_draft_tokens"] > 0
    *chunks, last = serving.events(content)
    pieces = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(pieces) == wanted.text[0] and last == "[DONE]"
