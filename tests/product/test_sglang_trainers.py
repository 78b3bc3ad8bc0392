"""What trainers that speak SGLang send to a server, with the fields and in the order of each."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import threading
import time
from typing import Any

import jax
import numpy as np
import pytest
from serving import events, post, running, send

import specjax
from specjax.serve import Engine

for package in ("starlette", "uvicorn", "pydantic", "sse_starlette", "prometheus_client"):
    pytest.importorskip(package)

PROMPT = [5, 9, 7, 12]


def target() -> specjax.LanguageModel:
    return specjax.load(specjax.shipped("tiny/target"))


@functools.cache
def nudged() -> specjax.LanguageModel:
    noise = functools.partial(jax.random.normal, jax.random.key(1))
    params = jax.tree.map(lambda x: x + 0.03 * noise(x.shape, x.dtype), target().params)
    return dataclasses.replace(target(), params=params)


@pytest.fixture(scope="module")
def port():
    engine = Engine(target(), {}, slots=2, capacity=96, chunk=16, logprobs=0, default="none")
    with engine as made, running(made, admin=True) as (_, port):
        yield port


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("weights") / "step_1"
    specjax.save(nudged(), made)
    return made


def get(port: int, path: str) -> Any:
    status, _, content = send(port, "GET", path)
    assert status == 200, (status, content)
    return json.loads(content)


def slime(port: int, seed: int, new: int = 12, **more: Any) -> dict[str, Any]:
    """slime's body of `/generate`."""
    settings = {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": new, "stop": None,
        "stop_token_ids": None, "skip_special_tokens": False, "no_stop_trim": True,
        "spaces_between_special_tokens": False, "sampling_seed": seed, **more,
    }  # fmt: skip
    body = {"input_ids": PROMPT, "sampling_params": settings, "return_logprob": True}
    return post(port, "/generate", body, **{"X-SMG-Routing-Key": "session"})


def test_slime(port):
    """Waits until the server is well, samples, and aborts until nothing runs."""
    assert send(port, "GET", "/health_generate")[0] == 200
    assert send(port, "GET", "/flush_cache")[0] == 200
    made = slime(port, 3)
    wanted = specjax.generate(
        target(), [PROMPT], seed=3, temperature=1.0, max_new_tokens=12, proposer="none", logprobs=0
    )
    pairs = made["meta_info"]["output_token_logprobs"]
    assert [pair[1] for pair in pairs] == wanted.tokens[0]
    assert wanted.logprobs is not None
    np.testing.assert_allclose([pair[0] for pair in pairs], wanted.logprobs[0].warped, atol=1e-5)

    answers = []
    long = threading.Thread(target=lambda: answers.append(slime(port, 4, 80, ignore_eos=True)))
    long.start()
    loads = "/v1/loads?include=core,disagg,queues"
    while get(port, loads)["loads"][0]["num_total_reqs"] == 0 and long.is_alive():
        time.sleep(0.001)
    post(port, "/abort_request", {"abort_all": True})
    while get(port, "/v1/loads")["loads"][0]["num_total_reqs"]:
        time.sleep(0.01)
    long.join()
    (cut,) = answers
    assert cut["meta_info"]["finish_reason"]["type"] in ("abort", "length")
    assert len(cut["meta_info"]["output_token_logprobs"]) == len(cut["output_ids"])


def test_stop_strings_and_special_tokens_stay_where_they_are_asked_for(port):
    text = slime(port, 3, 20, ignore_eos=True)
    stop = text["text"][4:6]
    kept = slime(port, 3, 20, ignore_eos=True, stop=[stop])
    trimmed = slime(port, 3, 20, ignore_eos=True, stop=[stop], no_stop_trim=False)
    assert stop in kept["text"] and stop not in trimmed["text"]
    assert kept["text"].startswith(trimmed["text"] + stop)
    assert kept["output_ids"] == trimmed["output_ids"]
    tokenizer = target().tokenizer
    assert tokenizer is not None
    special = tokenizer.decode(list(target().eos), skip_special_tokens=False)
    bias = {str(target().eos[0]): 99.0}
    for skip in (False, True):
        ended = slime(port, 3, skip_special_tokens=skip, logit_bias=bias)
        assert ended["output_ids"] == list(target().eos)
        assert ended["text"] == ("" if skip else special)
    trimmed = slime(port, 3, skip_special_tokens=False, no_stop_trim=False, logit_bias=bias)
    assert trimmed["output_ids"] == list(target().eos) and trimmed["text"] == ""


@pytest.mark.parametrize("trims", [False, True])
def test_a_stream_shows_what_the_whole_text_shows(port, trims):
    """Each chunk goes on where the one before ended, with special tokens and the stop string; a
    stop string in the name of a special token is none."""
    bias = {str(target().eos[0]): 9.0}  # in the middle of the text, which it does not end
    special = "<|endoftext|>"
    plain = slime(port, 3, 40, ignore_eos=True, logit_bias=bias, skip_special_tokens=True)
    stop = plain["text"][4:6]
    settings = {
        "ignore_eos": True, "logit_bias": bias, "stop": ["|>", stop], "no_stop_trim": not trims,
    }  # fmt: skip
    wanted = slime(port, 3, 40, **settings)["text"]
    body = {
        "input_ids": PROMPT, "stream": True,
        "sampling_params": {
            "temperature": 1.0, "max_new_tokens": 40, "sampling_seed": 3,
            "skip_special_tokens": False, **settings,
        },
    }  # fmt: skip
    content = send(port, "POST", "/generate", body)[2]
    shown = [event["text"] for event in events(content) if event != "[DONE]"]
    assert shown[-1] == wanted and special in shown[-2] and special in wanted
    assert (stop in wanted) != trims and plain["text"].index(stop) == len(
        wanted.replace(special, "").partition(stop)[0]
    )
    assert all(later.startswith(text) for text, later in itertools.pairwise(shown))


def test_areal(port, folder):
    """Pauses, which ends the requests, gives weights, goes on, and asks for the rest of a text."""
    settings = {"top_p": 1.0, "top_k": 2**30, "max_new_tokens": 80, "temperature": 1.0,
                "stop_token_ids": [], "frequency_penalty": 0.0}  # fmt: skip
    body: dict[str, Any] = {
        "input_ids": PROMPT, "image_data": [], "sampling_params": settings, "return_logprob": True,
        "stream": False,
    }  # fmt: skip
    answers = []
    reader = threading.Thread(target=lambda: answers.append(post(port, "/generate", body)))
    reader.start()
    while get(port, "/v1/loads")["loads"][0]["num_running_reqs"] == 0 and reader.is_alive():
        time.sleep(0.001)
    assert send(port, "POST", "/pause_generation")[0] == 200
    reader.join()
    (first,) = answers
    update = {"model_path": str(folder), "abort_all_request": True}
    assert post(port, "/update_weights_from_disk", update)["success"]
    assert send(port, "POST", "/continue_generation")[0] == 200
    if first["meta_info"]["finish_reason"]["type"] == "abort":
        tokens = [pair[1] for pair in first["meta_info"]["output_token_logprobs"]]
        body["input_ids"], settings["max_new_tokens"] = [*PROMPT, *tokens], 80 - len(tokens)
        rest = post(port, "/generate", body)
        assert rest["meta_info"]["prompt_tokens"] == len(PROMPT) + len(tokens)
        assert rest["meta_info"]["finish_reason"]["type"] in ("stop", "length")
    greedy = {"input_ids": PROMPT, "sampling_params": {"temperature": 0.0, "max_new_tokens": 8}}
    options = {"temperature": 0.0, "max_new_tokens": 8, "proposer": "none"}
    wanted = specjax.generate(specjax.load(folder), [PROMPT], **options).tokens[0]
    assert post(port, "/generate", greedy)["output_ids"] == wanted


def test_versions_of_weights(port, folder):
    """verl's and slime's versions come back with every text; a flush is never refused."""
    update = {"model_path": str(folder), "flush_cache": False, "load_format": "auto",
              "weight_version": "7"}  # fmt: skip
    assert post(port, "/update_weights_from_disk", update)["success"]
    assert get(port, "/get_weight_version") == {"weight_version": "7"}
    assert slime(port, 1)["meta_info"]["weight_version"] == "7"
    made = post(port, "/update_weight_version", {"new_version": "8", "abort_all_requests": False})
    assert made["success"] and get(port, "/server_info")["weight_version"] == "8"
    assert send(port, "GET", "/flush_cache?reset_connector=true")[0] == 200


@pytest.mark.parametrize(
    ("path", "cure"),
    [
        ("update_weights_from_tensor", "send /update_weights_from_disk"),
        ("update_weights_from_distributed", "send /update_weights_from_disk"),
        ("init_weights_update_group", "send /update_weights_from_disk"),
    ],
)
def test_what_is_not_there_is_said(port, path, cure):
    """A trainer that does not look at the body sees the status."""
    status, _, content = send(port, "POST", f"/{path}", {"tags": ["weights"]})
    assert status == 501 and cure in content.decode()
