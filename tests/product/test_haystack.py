"""The RAG pipeline of examples: its component, and Haystack's own client of a server."""

from __future__ import annotations

import json
import os

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"  # before it is imported

import serving
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.utils import Secret
from serving import post, running

import specjax
from examples.haystack_rag import QUESTION, SpecjaxGenerator, ask, library, pipeline

SHORT = ["def one(x): return x + 1", "def two(x): return x + 2", "def no(x): return not x"]


def test_passages_are_drafted_from():
    """The text is that of plain decoding, from fewer passes."""
    target = specjax.load("checkpoints/pycode/target")
    answers = [
        ask(
            pipeline(
                SpecjaxGenerator(target, max_new_tokens=24, proposer=proposer), library(), True
            ),
            QUESTION,
        )
        for proposer in ("none", "ngram")
    ]
    assert answers[0]["replies"] == answers[1]["replies"]
    assert answers[0]["meta"][0]["tau"] == 1.0 < answers[1]["meta"][0]["tau"]


def test_the_client_of_a_server():
    """Haystack's generator for OpenAI gives the text of the server, with and without drafts."""
    with running(serving.engine()) as (_, port):
        texts = []
        for drafter in ("none", "lookup"):
            own = {"max_completion_tokens": 12, "seed": 3}
            made = OpenAIChatGenerator(
                api_key=Secret.from_token("none"), api_base_url=f"http://127.0.0.1:{port}/v1",
                model="target",
                generation_kwargs={**own, "extra_body": {"speculation": {"drafter": drafter}}},
            )  # fmt: skip
            (reply,) = ask(pipeline(made, SHORT, False), "def two(x)")["replies"]
            texts.append(reply.text)
        messages = [{"role": "user", "content": f"{SHORT[1]}\n{SHORT[0]}\ndef two(x)"}]
        answer = post(port, "/v1/chat/completions", {"messages": messages, **own})
    assert texts == [answer["choices"][0]["message"]["content"]] * 2, json.dumps(answer)
