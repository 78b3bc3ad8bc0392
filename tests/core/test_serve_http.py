"""The HTTP server over loopback: its answers, its bounds, and clients that misbehave.

Table models stand for the tiny pair; `test_front_door_server.py` serves the pair itself.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import importlib.util
import json
import shutil
import socket
import time

import jax
import pytest
import serving
import table_pair
from command_line import ROOT
from serving import events, post, running, send

import specjax
from specjax._internal.extras import install
from specjax.generation import Request
from specjax.serve import admission
from specjax.text import Texts

for package in ("starlette", "uvicorn", "pydantic", "sse_starlette", "prometheus_client"):
    pytest.importorskip(package)

TINY = ROOT / "checkpoints" / "tiny"
_spec = importlib.util.spec_from_file_location("browser", ROOT / "docs" / "browser.py")
browser = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(browser)
ASK = {"prompt": "def main(", "max_tokens": 12, "seed": 3, "temperature": 0.8}


@pytest.fixture(scope="module")
def port():
    with running(serving.engine()) as (_, port):
        yield port


def plain(seed: int = 3, count: int = 1, **options) -> specjax.Output:
    fields = {"max_new_tokens": 12, "temperature": 0.8, "seed": seed, "proposer": "none"}
    return specjax.generate(serving.engine().target, ["def main("] * count, **fields | options)


def test_a_completion_is_the_text_of_generate(port):
    """With every drafter; the usage and the figures of speculation are those of the text."""
    wanted = plain()
    for drafter in ("none", "lookup", "draft", "tree", "lookup+draft"):
        asked = {**ASK, "speculation": {"drafter": drafter}, "return_guesses": True}
        answer = post(port, "/v1/completions", asked)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["token_ids"]) == (wanted.text[0], wanted.tokens[0])
        assert choice["finish_reason"] == "length" and choice["logprobs"] is None
        assert answer["usage"]["completion_tokens"] == 12
        assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 12
        figures = answer["metrics"]["speculative_decoding"]
        accepted = sum(guess[0] > 0 for guess in choice["guesses"])
        assert figures["num_accepted_draft_tokens"] == accepted
        assert sum(figures["per_step_accepted"]) == accepted
        assert sum(figures["acceptance_histogram"]) == figures["num_spec_steps"]
        assert len(figures["acceptance_histogram"]) == figures["num_spec_tokens"] + 1
        assert sum(figures["per_step_drafted"]) == figures["num_draft_tokens"]
        assert answer["metrics"]["seed"] == 3
        if drafter == "none":
            assert figures["num_spec_steps"] == 0 and figures["mean_acceptance_length"] is None


def test_streams_have_the_same_texts(port):
    """Several prompts and several texts each; the chunks of a text join to the whole answer."""
    asked = {**ASK, "prompt": ["def main(", "import "], "n": 2}
    whole = post(port, "/v1/completions", asked)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in whole["choices"][:2]] == plain(count=2).text
    options = {"include_usage": True, "continuous_usage_stats": True}
    for extra in ({}, {"stream_options": options}, {"return_guesses": True}):
        _, headers, content = send(
            port, "POST", "/v1/completions", {**asked, "stream": True, **extra}
        )
        assert headers["content-type"].startswith("text/event-stream")
        *chunks, last = events(content)
        assert last == "[DONE]"
        texts, ends = [""] * 4, [None] * 4
        for chunk in chunks:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
                ends[choice["index"]] = choice["finish_reason"] or ends[choice["index"]]
                if "pieces" in choice:
                    assert "".join(choice["pieces"]) == choice["text"]
        assert texts == [choice["text"] for choice in whole["choices"]]
        assert ends == [choice["finish_reason"] for choice in whole["choices"]]
        assert (chunks[-1]["choices"] == []) == ("stream_options" in extra)
        if "stream_options" in extra:
            assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
            assert all("usage" in chunk for chunk in chunks if chunk["choices"][:1] and
                       chunk["choices"][0]["finish_reason"] is None)  # fmt: skip
        assert "speculative_decoding" in chunks[-1]["metrics"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_prepared_once(port, monkeypatch, stream):
    """That is once for each prompt, however many texts it asks for."""
    prepared, prepare = [], admission.prepare

    def counting(*arguments, **options):
        prepared.append(arguments)
        return prepare(*arguments, **options)

    monkeypatch.setattr(admission, "prepare", counting)
    for prompts, n in (("def main(", 1), ("def main(", 3), (["def main(", "import "], 2)):
        prepared.clear()
        asked = {**ASK, "prompt": prompts, "n": n, "stream": stream}
        assert send(port, "POST", "/v1/completions", asked)[0] == 200
        assert len(prepared) == (1 if isinstance(prompts, str) else len(prompts))
    for path in ("/v1/chat/completions", "/generate"):
        prepared.clear()
        body = {"messages": [{"role": "user", "content": "a"}], "n": 2, "max_tokens": 4}
        if path == "/generate":
            body = {"inputs": "def main(", "parameters": {"max_new_tokens": 4}}
        assert send(port, "POST", path, body)[0] == 200
        assert len(prepared) == 1


def test_an_engine_checks_a_request_on_the_host(port):
    """It moves nothing to a device, with settings of every kind."""
    checker = serving.engine().checker
    asked = Request(
        prompts="def main(", proposer="lookup+draft", temperature=0.8, top_p=0.9, logprobs=1,
        bad_words=["x"], logit_bias={5: 1.0}, stop="zzz", constraint=specjax.Regex("[a-z]*"),
    )  # fmt: skip
    with jax.transfer_guard("disallow_explicit"):
        admitted = checker.admit(asked)
    row = admitted.row
    leaves = jax.tree.leaves((row.tokens, row.sampling, row.processors, row.eos))
    assert not any(isinstance(leaf, jax.Array) for leaf in leaves)


def test_streams_join_to_the_result(port, monkeypatch):
    """On every route, with a stop string inside of the text, with drafts and without: the pieces
    and the tokens of a stream are those of the result. A delay before a text is cut gives readers
    the time to see what they may not."""
    cut = Texts.cut

    def slow(*arguments):
        time.sleep(0.005)
        return cut(*arguments)

    monkeypatch.setattr(Texts, "cut", slow)
    greedy = {"temperature": 0.0, "max_new_tokens": 40}
    stop = plain(**greedy).text[0][6:10]
    wanted = plain(**greedy, stop=stop)
    text, tokens = wanted.text[0], wanted.tokens[0]
    assert wanted.finish == ["stop"] and len(text) == 6
    target = serving.engine().target
    stream = specjax.generate(
        target, "def main(", proposer="none", stop=stop, stream=True, **greedy
    )
    assert "".join(stream) == text and stream.output.text == [text]
    asked = {"prompt": "def main(", "temperature": 0, "max_tokens": 40, "stop": stop, "logprobs": 1}
    chat = {**asked, "messages": [{"role": "user", "content": "def"}], "logprobs": True}
    del chat["prompt"]
    inputs = {"inputs": "def main(", "parameters": {"max_new_tokens": 40, "stop": [stop],
              "details": True}}  # fmt: skip
    for drafter in ("none", "lookup", "draft", "lookup+draft"):
        request = specjax.Request(prompts="def main(", proposer=drafter, stop=stop, **greedy)
        handle = serving.engine().submit(request)
        made, served = list(handle), handle.result()
        assert (served.text, served.tokens, served.finish) == (text, tokens, "stop")
        assert "".join(new.text for new in made) == text
        assert [token for new in made for token in new.tokens] == tokens
        more = {"speculation": {"drafter": drafter}, "stream": True, "return_guesses": True}
        made = _choices(port, "/v1/completions", asked | more)
        assert "".join(one["text"] for one in made) == text
        made = [one for one in made if "pieces" in one]
        assert [token for one in made for token in one["token_ids"]] == tokens
        assert "".join(piece for one in made for piece in one["pieces"]) == text
        assert "".join(word for one in made for word in one["logprobs"]["tokens"]) == text
        whole = post(port, "/v1/completions", asked)["choices"][0]
        assert whole["text"] == "".join(whole["logprobs"]["tokens"]) == text
        said = post(port, "/v1/chat/completions", {**chat, "stop": None})["choices"][0]["message"]
        inside = {**chat, "stop": said["content"][6:10]}
        message = post(port, "/v1/chat/completions", inside)["choices"][0]["message"]["content"]
        assert said["content"].startswith(message) and len(message) <= 6
        made = _choices(port, "/v1/chat/completions", inside | more)
        assert "".join(one["delta"].get("content", "") for one in made) == message
        words = [
            entry["token"] for one in made for entry in one.get("logprobs", {}).get("content", [])
        ]
        assert "".join(words) == message
    whole = post(port, "/generate", inputs)
    made = events(send(port, "POST", "/generate_stream", inputs)[2])
    assert whole["generated_text"] == made[-1]["generated_text"] == text
    assert whole["details"]["tokens"] == [event["token"] for event in made]
    assert "".join(event["token"]["text"] for event in made) == text
    assert [event["token"]["id"] for event in made] == tokens


def _choices(port: int, path: str, asked: dict) -> list[dict]:
    """The choices of the chunks of a stream with one text."""
    chunks = events(send(port, "POST", path, asked)[2])[:-1]
    return [choice for chunk in chunks for choice in chunk["choices"]]


def test_chats_and_tokenize(port):
    messages = [{"role": "user", "content": [{"type": "text", "text": "def"}]}]
    asked = {"messages": messages, "max_completion_tokens": 5, "temperature": 0, "logprobs": True,
             "top_logprobs": 2}  # fmt: skip
    answer = post(port, "/v1/chat/completions", asked)
    message = answer["choices"][0]["message"]
    output = specjax.generate(
        serving.engine().target, messages=[{"role": "user", "content": "def"}], temperature=0,
        max_new_tokens=5, proposer="none", logprobs=2,
    )  # fmt: skip
    assert message == {"role": "assistant", "content": output.text[0]}
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == pytest.approx(output.logprobs[0].raw)
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    *chunks, _ = events(send(port, "POST", "/v1/chat/completions", {**asked, "stream": True})[2])
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(deltas) == output.text[0]
    counted = post(port, "/tokenize", {"messages": messages})
    assert counted["count"] == len(counted["tokens"]) == answer["usage"]["prompt_tokens"]
    assert post(port, "/tokenize", {"prompt": "def main("})["max_model_len"] == 192
    closed = {"messages": messages, "add_generation_prompt": False, "return_token_strs": True}
    words = post(port, "/tokenize", closed)
    assert len(words["token_strs"]) == words["count"] > 0
    for kind in ("image_url", "refusal"):
        part = {"type": kind, kind: {"url": "https://x/y.png"}}
        shown = {"messages": [{"role": "user", "content": [messages[0]["content"][0], part]}]}
        status, _, content = send(port, "POST", "/v1/chat/completions", shown)
        said = json.loads(content)["error"]["message"]
        assert status == 400 and f"messages[0] has a part of the type '{kind}'" in said
    status, _, content = send(port, "POST", "/tokenize", {"prompt": "x", "model": "gpt"})
    assert status == 404 and b"there is no model 'gpt'" in content
    # Without a limit a chat writes until the slot is full.
    whole = post(port, "/v1/chat/completions", {"messages": messages, "ignore_eos": True})
    assert whole["usage"]["total_tokens"] == 192


def test_settings_reach_the_engine(port):
    """Each of them as in `generate`."""
    for field, value, option in [
        ("top_k", 5, {"top_k": 5}),
        ("top_k", -1, {}),
        ("top_p", 0.5, {"top_p": 0.5}),
        ("min_p", 0.2, {"min_p": 0.2}),
        ("presence_penalty", 1.5, {"presence_penalty": 1.5}),
        ("frequency_penalty", 1.5, {"frequency_penalty": 1.5}),
        ("repetition_penalty", 1.5, {"repetition_penalty": 1.5}),
        ("logit_bias", {"84": 30}, {"logit_bias": {84: 30.0}}),
        ("stop", "a", {"stop": "a"}),
        ("stop_token_ids", [84], {"eos": [0, 84]}),
        ("min_tokens", 3, {"min_new_tokens": 3}),
    ]:
        answer = post(port, "/v1/completions", {**ASK, field: value})
        assert answer["choices"][0]["text"] == plain(**option).text[0], field


def test_null_and_what_the_server_does_anyway(port):
    """OpenAI's API says "or null" of every optional field; some values ask for what happens."""
    from specjax.serve.http.fields import Completion

    optional = [
        name for name, field in Completion.model_fields.items()
        if not field.is_required() and name not in ASK
    ]  # fmt: skip
    asked = {**ASK, **dict.fromkeys([*optional, "tools", "user"])}
    asked |= {"tool_choice": "none", "skip_special_tokens": True, "best_of": 1}
    assert post(port, "/v1/completions", asked)["choices"][0]["text"] == plain().text[0]


def test_an_adapter_brings_its_drafter(port):
    """Where the drafter by default has no adapters, and none is named."""
    asked = {**ASK, "speculation": {"adapter": "two"}, "return_guesses": True}
    answer = post(port, "/v1/completions", asked)
    named = post(port, "/v1/completions", {**asked, "model": "two", "speculation": {}})
    assert answer["choices"] == named["choices"]
    assert answer["choices"][0]["text"] == plain().text[0]
    drafters = {guess[1] for guess in answer["choices"][0]["guesses"]}
    assert drafters <= {"medusa", None} and answer["metrics"]["speculative_decoding"][
        "num_draft_tokens"
    ]  # fmt: skip


def test_models_health_metrics_and_the_page(port):
    from prometheus_client.parser import text_string_to_metric_families as families

    models = json.loads(send(port, "GET", "/v1/models")[2])["data"]
    assert [entry["id"] for entry in models] == ["target", "one", "two"]
    assert [entry["parent"] for entry in models] == [None, "target", "target"]
    assert send(port, "GET", "/health")[0] == 200
    before = _counts(families, port)
    answer = post(port, "/v1/completions", {**ASK, "speculation": {"drafter": "draft"}})
    after, figures = _counts(families, port), answer["metrics"]["speculative_decoding"]
    for name, value in [
        ("num_drafts", figures["num_spec_steps"]),
        ("num_draft_tokens", figures["num_draft_tokens"]),
        ("num_accepted_tokens", figures["num_accepted_draft_tokens"]),
    ]:
        sample = f"vllm:spec_decode_{name}_total"
        assert after[sample] - before[sample] == value
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert after[per_position] - before[per_position] == figures["num_accepted_draft_tokens"]
    assert after["vllm:time_to_first_token_seconds_count"] > 0
    page = send(port, "GET", "/")[2].decode()
    assert '"name": "lookup"' in page and "{{" not in page
    assert "http://" not in page and "https://" not in page  # nothing is loaded from elsewhere


def _counts(families, port: int) -> dict[str, float]:
    counts: dict[str, float] = {}
    for family in families(send(port, "GET", "/metrics")[2].decode()):
        for sample in family.samples:
            counts[sample.name] = counts.get(sample.name, 0.0) + sample.value
    return counts


def test_lorax(port):
    """Its two routes and its root, with an adapter by name; drafts are "skipped" tokens."""
    parameters = {"adapter_id": "one", "max_new_tokens": 8, "temperature": 0.8, "seed": 3,
                  "details": True}  # fmt: skip
    asked = {"inputs": "def main(", "parameters": parameters}
    answer = post(port, "/generate", asked)
    text = plain(max_new_tokens=8).text[0]
    assert answer["generated_text"] == text
    details = answer["details"]
    assert (details["finish_reason"], details["generated_tokens"]) == ("length", 8)
    assert details["skipped_tokens"] == sum(token["skipped"] for token in details["tokens"])
    assert all(token["logprob"] < 0 for token in details["tokens"])
    stream = events(send(port, "POST", "/generate_stream", asked)[2])
    assert [event["token"]["id"] for event in stream] == [t["id"] for t in details["tokens"]]
    assert [event["generated_text"] for event in stream] == [None] * 7 + [text]
    assert stream[-1]["details"]["seed"] == 3
    full = {**asked, "parameters": {**parameters, "return_full_text": True}}
    assert post(port, "/", full)[0]["generated_text"] == "def main(" + text
    greedy = post(port, "/generate", {"inputs": "def main(", "parameters": {"max_new_tokens": 8}})
    assert greedy["generated_text"] == plain(temperature=0, max_new_tokens=8).text[0]
    cold = {"inputs": "def main(", "parameters": {"max_new_tokens": 8, "temperature": 0.0,
            "do_sample": True, "seed": 3}}  # fmt: skip
    assert post(port, "/generate", cold)["generated_text"] == greedy["generated_text"]
    other = {"inputs": "def main(", "parameters": {"adapter_id": "three"}}
    status, _, content = send(port, "POST", "/generate", other)
    assert status == 400 and b"no adapter 'three'; this server has one, two" in content


def test_what_loraxs_client_sends(port):
    """It names every parameter, also those that are off; one that is on and not honoured, and one
    that LoRAX does not know, are refused by name."""
    off = dict.fromkeys(
        ("adapter_id", "adapter_source", "merged_adapters", "api_token", "repetition_penalty",
         "top_k", "top_p", "truncate", "typical_p", "best_of", "return_k_alternatives",
         "response_format")
    )  # fmt: skip
    off |= {"watermark": False, "decoder_input_details": False, "do_sample": True, "stop": [],
            "details": True, "return_full_text": False, "ignore_eos_token": False}  # fmt: skip
    parameters = {**off, "max_new_tokens": 12, "temperature": 0.8, "seed": 3}
    asked = {"inputs": "def main(", "stream": False, "parameters": parameters}
    assert post(port, "/generate", asked)["generated_text"] == plain().text[0]
    for name, value in (("typical_p", 0.5), ("typical", 1)):
        other = {**asked, "parameters": {**parameters, name: value}}
        status, _, content = send(port, "POST", "/generate", other)
        answer = json.loads(content)
        assert status == 400 and name in answer["error"] and answer["error_type"] == "validation"


@pytest.mark.filterwarnings("ignore:The `dict` method is deprecated")
def test_lorax_client(port):
    lorax = pytest.importorskip("lorax")
    client = lorax.Client(f"http://127.0.0.1:{port}", timeout=60)
    options = {"max_new_tokens": 12, "seed": 3, "temperature": 0.8, "do_sample": True}
    wanted = plain().text[0]
    for adapter in (None, "one"):
        made = client.generate("def main(", adapter_id=adapter, **options)
        assert made.generated_text == wanted and made.details.generated_tokens == 12
    stream = list(client.generate_stream("def main(", **options))
    assert stream[-1].generated_text == wanted
    assert "".join(piece.token.text for piece in stream) == wanted
    with pytest.raises(lorax.errors.ValidationError, match="there is no adapter 'another'"):
        client.generate("def main(", adapter_id="another", **options)


def test_the_page_in_a_browser(port):
    """In Chromium, where it and its driver are installed: both texts, the colours, the verdict."""
    if absent := browser.missing(shutil.which):
        pytest.skip(f"not installed: {', '.join(absent)}")
    with browser.browser() as command:
        page = browser.write(command, f"http://127.0.0.1:{port}")
    assert page["verdict"] == "same tokens: all 96 of them"
    assert page["with"] == page["without"] != ""
    assert len(page["kinds"]) == 96 and {"d1", "bonus", ""} <= set(page["kinds"])


def test_schemas(port):
    """A text of the schema, which is that of `generate`, beside requests without one; a schema that
    is too large for the engine is refused."""
    pytest.importorskip("outlines_core")
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["a", "bc"]}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked = {**ASK, "max_tokens": 60, "response_format": form}
    wanted = plain(constraint=specjax.JSONSchema(schema), max_new_tokens=60).text[0]
    assert set(json.loads(wanted)) == {"name", "age"}
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        texts = [
            pool.submit(post, port, "/v1/completions", {**more, "speculation": {"drafter": name}})
            for more in (asked, ASK)
            for name in ("none", "lookup", "draft")
        ]
        made = [text.result()["choices"][0]["text"] for text in texts]
    assert made == [wanted] * 3 + plain().text * 3
    lorax = {"response_format": {"type": "json_object", "schema": schema}, "seed": 3,
             "temperature": 0.8, "max_new_tokens": 60}  # fmt: skip
    answer = post(port, "/generate", {"inputs": "def main(", "parameters": lorax})
    assert answer["generated_text"] == wanted
    schema["properties"]["name"] = {
        "enum": [hashlib.sha256(b"%d" % n).hexdigest() for n in range(40)]
    }
    status, _, content = send(port, "POST", "/v1/completions", {**asked, "max_tokens": 120})
    assert status == 400 and b"raise constraint_size" in content


def test_openai_client(port):
    openai = pytest.importorskip("openai")
    url = f"http://127.0.0.1:{port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        _ask_as_openai(openai, client)


def _ask_as_openai(openai, client):
    assert client.models.list().data[0].id == "target"
    wanted = plain().text[0]
    answer = client.completions.create(model="target", **ASK)
    assert answer.choices[0].text == wanted
    stream = client.completions.create(
        model="one", **ASK, stream=True, extra_body={"speculation": {"num_speculative_tokens": 1}}
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == wanted
    chat = client.chat.completions.create(
        model="target", messages=[{"role": "user", "content": "x"}], max_tokens=4, seed=1,
        stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    assert list(chat)[-1].usage.completion_tokens == 4
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
        client.completions.create(model="gpt", **ASK)
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    called = client.chat.completions.create(
        model="target", messages=[{"role": "user", "content": "x"}], max_tokens=64, seed=1,
        tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}],
        tool_choice="required",
    ).choices[0]  # fmt: skip
    (call,) = called.message.tool_calls
    assert (called.finish_reason, call.function.name) == ("tool_calls", "f")
    assert list(json.loads(call.function.arguments)) == ["on"]


@pytest.mark.parametrize(
    "status, changes, message",
    [
        (400, b"{", "not JSON"),
        (400, b"[1]", "is a list; send a JSON object"),
        (400, b'{"prompt": NaN}', "NaN is not part of JSON"),
        (400, b"[" * 100_000, "not JSON"),
        (400, b"\xff\xfe", "not JSON"),
        (400, {"prompt": None}, "prompt=None"),
        (400, {"prompt": ""}, "prompt 0 is empty"),
        (400, {"prompt": []}, "prompts is empty"),
        (400, {"prompt": [1, "a"]}, "prompt"),
        (400, {"prompt": [99999]}, "vocabulary"),
        (400, {"prompt": [1] * 193}, "holds 192: shorten it"),
        (400, {"prompt": "\ud800"}, "cannot be encoded"),
        (404, {"model": "gpt"}, "there is no model 'gpt'; this server has one, two, target"),
        (400, {"max_tokens": 0}, "max_tokens=0"),
        (400, {"max_tokens": -1}, "max_tokens=-1"),
        (400, {"max_tokens": 10**9}, "pass max_tokens="),
        (400, {"max_tokens": "12"}, "max_tokens='12' is not allowed"),
        (400, {"max_tokens": True}, "max_tokens=True is not allowed"),
        (400, {"temperature": -1}, "temperature=-1"),
        (400, {"temperature": "hot"}, "temperature='hot'"),
        (400, {"top_p": -0.5}, "top_p=-0.5"),
        (400, {"min_p": -0.5}, "min_p=-0.5"),
        (400, {"min_tokens": -3}, "min_tokens=-3"),
        (400, {"repetition_penalty": -1}, "repetition_penalty=-1"),
        (400, {"n": 0}, "n=0"),
        (400, {"n": -1}, "n=-1"),
        (400, {"n": 17}, "at most 16"),
        (400, {"stop": [""]}, "empty string"),
        (400, {"logprobs": -1}, "logprobs=-1"),
        (400, {"logprobs": 3}, "records at most 2"),
        (400, {"logit_bias": {"a": 1}}, "token ids"),
        (400, {"logit_bias": {"-1": 1}}, "vocabulary"),
        (400, {"tools": [{}]}, "send messages to /v1/chat/completions"),
        (400, {"echo": True}, "put the prompt before"),
        (400, {"temperatur": 1}, "did you mean temperature"),
        (400, {"response_format": {"type": "json_schema"}}, "without a schema is not supported"),
        (400, {"response_format": {"type": "json_object"}}, "without a schema is not supported"),
        (400, {"response_format": {"type": "grammar"}}, "type 'grammar'"),
        (400, {"speculation": {"drafter": "eagle"}}, "none, lookup, draft, tree, medusa"),
        (400, {"speculation": {"adapter": "three"}}, "no adapter 'three'"),
        (400, {"speculation": {"drafter": "medusa"}}, "several adapters"),
        (400, {"speculation": {"num_speculative_tokens": -1}}, "num_speculative_tokens=-1"),
        (400, {"top_k": -2}, "top_k=-2"),
        (400, {"stop_token_ids": [1, 2, 3, 4, 5]}, "stop_token_ids has 6 ids"),
        (400, {"skip_special_tokens": False}, "texts have no special tokens"),
        (400, {"speculation": {"num_speculative_tokens": 9}}, r"in [0, 4]"),
        (400, {"speculation": {"depth": 1}}, "no field 'speculation.depth'; it takes drafter"),
    ],
)  # fmt: skip
def test_bad_requests(port, status, changes, message):
    """A status and a message that names the value; the server goes on."""
    asked = changes if isinstance(changes, bytes) else {**ASK, **changes}
    if changes == {"prompt": "\ud800"}:
        asked = b'{"prompt": "\\ud800"}'
    got, _, content = send(port, "POST", "/v1/completions", asked)
    error = json.loads(content)["error"]
    assert (got, error["code"]) == (status, status), content
    assert message in error["message"], error
    assert "_new_tokens" not in content.decode() and "num_drafts" not in content.decode()
    assert post(port, "/v1/completions", {**ASK, "max_tokens": 1})["choices"]


def test_routes_that_are_not_there(port):
    for method, path in [("GET", "/v2"), ("GET", "/v1/completions"), ("DELETE", "/v1/models")]:
        status, _, content = send(port, method, path)
        assert status == 404 and f"{method} {path}" in json.loads(content)["error"]["message"]


def test_keys_and_bodies():
    """A key, a body that is too large with and without its length, and one that never arrives."""
    with running(serving.engine(), api_key="s3cret", body=2000, body_seconds=0.5) as (_, port):
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "s3cret"}):
            status, answer, content = send(port, "POST", "/v1/completions", ASK, **headers)
            assert status == 401 and answer["www-authenticate"] == "Bearer"
            assert b"s3cret" not in content
        key = {"Authorization": "Bearer s3cret"}
        assert send(port, "GET", "/metrics")[0] == 401
        assert send(port, "GET", "/health")[0] == send(port, "GET", "/")[0] == 200
        assert post(port, "/v1/completions", ASK, **key)["choices"]
        large = {**ASK, "prompt": "x" * 3000}
        assert send(port, "POST", "/v1/completions", large, **key)[0] == 413
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer s3cret\r\n"
        chunked = (
            head + "Transfer-Encoding: chunked\r\n\r\n" + ("400\r\n" + "x" * 1024 + "\r\n") * 3
        )
        assert b" 413 " in _raw(port, chunked)
        assert b" 408 " in _raw(port, head + "Content-Length: 50\r\n\r\n{")


def _raw(port: int, text: str) -> bytes:
    """The first line of the answer to what is sent."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(text.encode())
        return connection.recv(4096).split(b"\r\n")[0]


def test_headers_that_do_not_arrive_end_the_connection():
    """A client that sends nothing, half a header, or that of its second request; one whose request
    runs longer than the limit is served."""
    head = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    with running(serving.engine(), header_seconds=0.3) as (_, port):
        for first in (b"", head, head + b"\r\n" + head):
            with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
                connection.sendall(first)
                answer = b""
                while part := connection.recv(4096):  # until the server closes
                    answer += part
                assert answer.count(b"HTTP/1.1 200") == first.count(b"\r\n\r\n")
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            content = json.dumps(ASK).encode()
            begun = head.replace(b"GET /health", b"POST /v1/completions")
            connection.sendall(begun + b"Content-Length: %d\r\n\r\n" % len(content))
            time.sleep(0.6)
            connection.sendall(content)
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")


def _settled(seconds: float = 20.0) -> None:
    """Wait until no request runs."""
    until = time.monotonic() + seconds
    while (now := serving.engine().load()).running or now.waiting:
        assert time.monotonic() < until, now
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slot(port, stream):
    _settled()
    before = serving.engine().load().cancelled
    long = {**ASK, "max_tokens": 180, "ignore_eos": True, "stream": stream, "n": 8}
    content = json.dumps(long).encode()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        while not serving.engine().load().running:
            time.sleep(0.001)
    _settled()
    assert serving.engine().load().cancelled > before


def test_slow_readers_and_half_open_connections_delay_nobody(port):
    """One reads nothing of its stream, one never sends its request, one sends half of it."""
    content = json.dumps({**ASK, "max_tokens": 180, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    held = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
    try:
        held[0].sendall(head.encode() + content)
        held[1].sendall(head.encode() + content[:10])
        held[2].sendall(b"POST /v1/comp")
        began = time.monotonic()
        assert post(port, "/v1/completions", ASK)["choices"][0]["text"] == plain().text[0]
        assert time.monotonic() - began < 20
    finally:
        for connection in held:
            connection.close()


def test_500_clients_at_once(port, monkeypatch):
    """Each is served, with the text of its seed, or is told when to come back."""
    made = serving.engine()
    _settled()
    monkeypatch.setattr(made._scheduler, "_most_waiting", 8)
    finished, wanted = made.load().finished, {seed: plain(seed).text[0] for seed in range(4)}

    async def one(number: int) -> int:
        content = json.dumps({**ASK, "seed": number % 4}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + b"Connection: close\r\n\r\n" + content)
        answer = await reader.read()
        writer.close()
        top, _, body = answer.partition(b"\r\n\r\n")
        status = int(top.split()[1])
        if status == 200:
            assert json.loads(body)["choices"][0]["text"] == wanted[number % 4]
        else:
            assert status == 429 and b"retry-after: " in top.lower()
        return status

    async def every() -> list[int]:
        return await asyncio.gather(*(one(number) for number in range(500)))

    statuses = asyncio.run(every())
    assert statuses.count(200) + statuses.count(429) == 500
    assert 0 < statuses.count(200) < 500
    state = made.load()
    assert (state.running, state.waiting) == (0, 0)
    assert state.finished - finished == statuses.count(200)


def test_refused_options(capsys, monkeypatch):
    from specjax.cli import main
    from specjax.cli.serve import fleet_of

    table_pair.stand_in(monkeypatch, TINY)
    for words, message in [
        (["--port", "99999"], "--port 99999"),
        (["--adapter", "folder"], "--adapter folder; it must look like name=folder"),
        (["--drafter", "draft=x"], "--drafter draft=... is taken"),
        (["--drafter", "x", "--drafter", "y"], "--drafter drafter=... is taken"),
        (["--max-body", "0"], "--max-body 0"),
        (["--target", str(TINY / "target"), "--default", "eagle"], "there are lookup, and none"),
        (["--target", str(TINY / "target"), "--slots", "0"], "--slots 0"),
        (["--default", "auto", "--no-lookup"], "--default auto chooses among lookup"),
        (["--default", "auto", "--num-drafts", "0"], "--default auto chooses among lookup"),
        (["--target", "/nowhere"], "/nowhere"),
        (["--replicas", "2", "--admin"], "--admin is not for a fleet"),
        (["--replicas", "2", "--waiting", "0"], "--waiting 0"),
        (["--replicas", "2", "--most-replicas", "1"], "--most-replicas 1 is below --replicas 2"),
        (["--most-replicas", "1"], "add --replicas 2"),
        (["--patience", "3", "--attempts", "2"], "--patience, --attempts are of a fleet"),
        (["--replicas", "2", "--slice", "v6e"], "--slice v6e; it must look like v6e:4x4"),
        (["--replicas", "2", "--slice", "v6e:4x4"], "set RAY_ADDRESS to it"),
        (["--replicas", "2", "--attempts", "0"], "--attempts 0 is not allowed"),
        (["--pin"], "add --replicas 2"),
        (["--router", "spread"], "add --replicas 2"),
        (["--otlp-traces-endpoint", "localhost"], "not localhost"),
        (["--mesh", "data=2"], "data=2 times model=1 is not the number of devices"),
    ]:
        with pytest.raises(SystemExit) as caught:
            main(["serve", *words])
        assert caught.value.code == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"arguments of the application are \['target'\]"):
        fleet_of({"target": "here"})
    with pytest.raises(ValueError, match="--slots 0"):
        fleet_of({"options": "--replicas 2 --slots 0"})
    monkeypatch.setattr("specjax.serve.listening._PACKAGES", ("starlette", "not_there"))
    with pytest.raises(SystemExit):
        main(["serve"])
    assert f"serving needs not_there: {install('serve')}" in (capsys.readouterr().err)
