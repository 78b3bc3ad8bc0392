"""SGLang's `/generate` as trainers call it, and pausing, flushing and new weights."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import threading
import time
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving import events, post, running, send

import specjax
from specjax import Request, kernels
from specjax.methods import BoundDrafter
from specjax.serve import Engine
from specjax.serve.releasing import take_arrays

for package in ("starlette", "uvicorn", "pydantic", "sse_starlette", "prometheus_client"):
    pytest.importorskip(package)

from specjax.serve.http import sglang  # noqa: E402 - it needs these packages

pytestmark = pytest.mark.xdist_group("sglang")  # a share takes all of them, or none

PROMPT, OTHER = [5, 9, 7, 12], [30, 2, 11]
LONG = {"max_new_tokens": 60, "temperature": 1.0, "sampling_seed": 3, "ignore_eos": True}


def target() -> specjax.LanguageModel:
    return specjax.load(specjax.shipped("tiny/target"))


@functools.cache
def nudged() -> specjax.LanguageModel:
    noise = functools.partial(jax.random.normal, jax.random.key(1))
    params = jax.tree.map(lambda x: x + 0.03 * noise(x.shape, x.dtype), target().params)
    return dataclasses.replace(target(), params=params)


@pytest.fixture(scope="module")
def engine():
    with Engine(
        target(), {"lookup": BoundDrafter(specjax.NGram(3))}, slots=2, capacity=96, chunk=16,
        logprobs=2, constraint_size=(256, 160), cache_tokens=256, page=16, default="none",
    ) as made:  # fmt: skip
        yield made


@pytest.fixture(scope="module")
def port(engine):
    with running(engine, admin=True) as (_, port):
        yield port


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The weights that are served, others, and others of another shape."""
    root = tmp_path_factory.mktemp("weights")
    for name, model in (("old", target()), ("new", nudged())):
        specjax.save(model, root / name)
    specjax.save(specjax.load(specjax.shipped("tiny/draft")), root / "draft")
    return root


def ask(prompt: Any = PROMPT, **sampling: Any) -> dict[str, Any]:
    return {"input_ids": prompt, "sampling_params": {**LONG, "max_new_tokens": 12, **sampling}}


def text_of(model: specjax.LanguageModel, prompt: list[int], new: int = 12, **more: Any):
    options = {"temperature": 1.0, "seed": 3, "eos": [], "proposer": "none", "logprobs": 2}
    return specjax.generate(model, [prompt], max_new_tokens=new, **{**options, **more})


def update(port: int, folder: Any, **more: Any) -> Any:
    return post(port, "/update_weights_from_disk", {"model_path": str(folder), **more})


def test_tokens_in_tokens_and_log_probabilities_out(port):
    body = {**ask(), "return_logprob": True, "top_logprobs_num": 2, "rid": "mine"}
    answer, wanted = post(port, "/generate", body), text_of(target(), PROMPT)
    assert answer["output_ids"] == wanted.tokens[0] and answer["text"] == wanted.text[0]
    info = answer["meta_info"]
    assert info["finish_reason"] == {"type": "length", "length": 12} and info["id"] == "mine"
    assert (info["prompt_tokens"], info["completion_tokens"]) == (4, 12)
    assert info["weight_version"] == "default" and info["e2e_latency"] > 0
    logprobs = info["output_token_logprobs"]
    assert [token for _, token, _ in logprobs] == answer["output_ids"]
    assert wanted.logprobs is not None
    (kept,) = wanted.logprobs
    np.testing.assert_allclose([x for x, *_ in logprobs], kept.warped, atol=1e-5)
    tops = [[token for _, token, _ in top] for top in info["output_top_logprobs"]]
    assert tops == np.asarray(kept.top_ids).tolist()
    greedy = post(port, "/generate", {**ask(temperature=0.0), "return_logprob": True})
    assert all(x < 0 for x, *_ in greedy["meta_info"]["output_token_logprobs"])


def test_batches_and_clones(port):
    """A prompt that comes again in a body is another sample, as the rows of `generate` are."""
    body = ask([PROMPT, OTHER, PROMPT], n=2)
    made = post(port, "/generate", body)
    assert [one["meta_info"]["prompt_tokens"] for one in made] == [4, 4, 3, 3, 4, 4]
    options = {"temperature": 1.0, "seed": 3, "eos": [], "proposer": "none"}
    four = specjax.generate(target(), [PROMPT] * 4, max_new_tokens=12, **options).tokens
    assert [made[n]["output_ids"] for n in (0, 1, 4, 5)] == four
    assert len({tuple(tokens) for tokens in four}) == 4
    several = {"input_ids": [PROMPT, OTHER], "rid": ["a", "b"], "return_logprob": [True, False],
               "sampling_params": [{"max_new_tokens": 3}, {"max_new_tokens": 5}]}  # fmt: skip
    one, two = post(port, "/generate", several)
    assert (len(one["output_ids"]), len(two["output_ids"])) == (3, 5)
    assert "output_token_logprobs" in one["meta_info"]
    assert "output_token_logprobs" not in two["meta_info"]
    unseeded = [post(port, "/generate", ask(sampling_seed=None))["output_ids"] for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_streams_are_cumulative(port):
    whole = post(port, "/generate", ask())
    _, headers, content = send(port, "POST", "/generate", {**ask(), "stream": True})
    *chunks, last = events(content)
    assert last == "[DONE]" and headers["content-type"].startswith("text/event-stream")
    for one, two in itertools.pairwise(chunks):
        assert two["output_ids"][: len(one["output_ids"])] == one["output_ids"]
        assert two["text"].startswith(one["text"])
        assert one["meta_info"]["finish_reason"] is None
    assert chunks[-1]["output_ids"] == whole["output_ids"] and chunks[-1]["text"] == whole["text"]
    several = events(send(port, "POST", "/generate", {**ask([PROMPT, OTHER]), "stream": True})[2])
    assert {chunk["index"] for chunk in several[:-1]} == {0, 1}


def test_ends_and_constraints(port):
    text = post(port, "/generate", {"text": "def main(", "sampling_params": LONG})
    stop = text["text"][3:5]
    stopped = post(port, "/generate", {"text": "def main(",
                                       "sampling_params": {**LONG, "stop": [stop]}})  # fmt: skip
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    token = text["output_ids"][4]
    ending = {"text": "def main(", "sampling_params": {**LONG, "stop_token_ids": [token]}}
    ended = post(port, "/generate", ending)
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    assert ended["output_ids"][-1] == token
    made = post(port, "/generate", ask(regex="[ab]{3}", ignore_eos=False))
    assert len(made["text"]) == 3 and set(made["text"]) <= set("ab")
    assert post(port, "/generate", {"inputs": "def main("})["generated_text"]  # LoRAX's, as before


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_changes_no_text(port, engine, mode, monkeypatch):
    """Requests that run and requests that come wait, and nothing moves until the end."""
    scheduler = engine._scheduler
    turn, two_run = scheduler._turn, threading.Event()

    def turn_until_two_run() -> None:
        """Waits for the pause once two run: the texts would end before a slow client's request."""
        turn()
        if not two_run.is_set() and engine.load().running == 2:
            two_run.set()
            with scheduler._changed:
                assert scheduler._changed.wait_for(lambda: scheduler._calls, 60)

    monkeypatch.setattr(scheduler, "_turn", turn_until_two_run)
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        asked = [ask(prompt, max_new_tokens=60) for prompt in (PROMPT, OTHER, [4, 4])]
        waiting = [pool.submit(post, port, "/generate", body) for body in asked]
        assert two_run.wait(60)
        post(port, "/pause_generation", {"mode": mode})
        try:
            late = pool.submit(post, port, "/generate", ask([8, 9]))
            time.sleep(0.2)
            assert not late.done() and engine.load().running == (2 if mode == "in_place" else 0)
        finally:
            post(port, "/continue_generation", {})
        made = [one.result(60)["output_ids"] for one in waiting]
        assert len(late.result(60)["output_ids"]) == 12
    for tokens, prompt in zip(made, (PROMPT, OTHER, [4, 4]), strict=True):
        assert tokens == text_of(target(), prompt, 60).tokens[0]


def test_abort(port, engine):
    """By the beginning of an id, all of them, and by a pause; a client that leaves, too."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for stop in (
            lambda: post(port, "/abort_request", {"rid": "long"}),
            lambda: post(port, "/abort_request", {"abort_all": True}),
            lambda: post(port, "/pause_generation", {}),
        ):
            bodies = [{**ask(max_new_tokens=90), "rid": f"long-{n}"} for n in range(3)]
            post(port, "/pause_generation", {"mode": "in_place"})
            handles = [pool.submit(post, port, "/generate", body) for body in bodies]
            until = time.monotonic() + 20
            while engine.load().waiting < 3 and time.monotonic() < until:
                time.sleep(0.001)
            stop()
            post(port, "/continue_generation", {})
            for handle in handles:
                reason = handle.result(60)["meta_info"]["finish_reason"]
                assert reason == {"type": "abort", "message": "the request was aborted"}
    assert engine.load().waiting == 0 and engine.load().running == 0


def test_new_weights(port, engine, folders):
    """Texts are those of the new weights, also where a prompt was copied before, and the version
    and the hash change; nothing is compiled; a text that runs is refused, or aborted."""
    compiled, old, new_model = engine.compiled(), engine.model_hash, specjax.load(folders / "new")
    shared = [1 + n % 40 for n in range(40)]
    for _ in range(2):
        post(port, "/generate", ask(shared, max_new_tokens=4))
    assert engine.load().copied_tokens > 0
    made = update(port, folders / "new", weight_version="step 1")
    assert made == {"success": True, "message": "Succeeded to update model weights.",
                    "num_paused_requests": 0}  # fmt: skip
    answer = post(port, "/generate", ask(shared))
    assert answer["meta_info"]["weight_version"] == "step 1"
    assert answer["meta_info"]["cached_tokens"] == 0
    assert answer["output_ids"] == text_of(new_model, shared).tokens[0]
    assert answer["output_ids"] != text_of(target(), shared).tokens[0]
    new = json.loads(send(port, "GET", "/get_model_info")[2])
    assert new["weight_version"] == "step 1" and new["model_hash"] != old
    handle = engine.submit(Request(prompts=[PROMPT], max_new_tokens=90, eos=[]))
    next(iter(handle))
    body = {"model_path": str(folders / "old")}
    status, _, content = send(port, "POST", "/update_weights_from_disk", body)
    if not handle.done():
        assert status == 400 and b"requests are running" in content
    done = update(port, folders / "old", abort_all_requests=True, weight_version="default")
    assert done["success"] and handle.result(60).finish in ("cancelled", "limit")
    assert engine.model_hash == old and engine.compiled() == compiled
    assert post(port, "/generate", ask())["output_ids"] == text_of(target(), PROMPT).tokens[0]


def test_matrices_that_are_in_bfloat16_are_read_so():
    """As `specjax serve` without `--dtype` keeps them, and as `update_weights` needs them."""
    place = specjax.shipped("tiny/target")
    kept = specjax.load(place, keep_bfloat16=True)
    assert kept.keeps_bfloat16 == kernels.widens_columns() and not target().keeps_bfloat16
    server: Any = types.SimpleNamespace(target=kept, check_weights=lambda: None)
    new = sglang.checkpoint(server, sglang.WeightsFromDisk(model_path=str(place)))
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(x, y, strict=True), new.params, kept.params
    )


def test_half_finished_texts_keep_their_tokens_under_new_weights(port, engine, folders):
    """After a retraction they go on with the new weights, as if the tokens had been a prompt."""
    handle = engine.submit(Request(prompts=[PROMPT], max_new_tokens=60, temperature=1.0, seed=3,
                                   eos=[], presence_penalty=0.4, logprobs=0))  # fmt: skip
    reader = threading.Thread(target=list, args=(handle,))
    reader.start()
    while not handle.tokens:
        time.sleep(0.0005)
    post(port, "/pause_generation", {"mode": "retract"})
    kept = list(handle.tokens)
    update(port, folders / "new")
    post(port, "/continue_generation", {})
    served = handle.result(60)
    reader.join()
    assert served.tokens[: len(kept)] == kept and len(served.tokens) == 60
    assert served.logprobs is not None and np.isfinite(served.logprobs.raw).all()
    if len(kept) < 60:
        again = Request(prompts=[PROMPT], max_new_tokens=60, temperature=1.0, seed=3, eos=[],
                        presence_penalty=0.4)  # fmt: skip
        assert engine.submit(again, resume=kept, fast=True).result(60).tokens == served.tokens
    update(port, folders / "old")


def test_flush(port, engine):
    prompt = [3 + n % 30 for n in range(40)]
    post(port, "/generate", ask(prompt))
    assert post(port, "/generate", ask(prompt))["meta_info"]["cached_tokens"] == 32
    status, _, content = send(port, "POST", "/flush_cache")
    assert (status, content) == (200, b"Cache flushed.\n")
    assert post(port, "/generate", ask(prompt))["meta_info"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/generate", {"text": "a", "input_ids": [1]}, "send either text or input_ids"),
        ("/generate", {"input_ids": [10**6]}, "10**6|1000000"),
        ("/generate", {"input_ids": []}, "empty"),
        ("/generate", ask(max_new_tokens=0), "sampling_params.max_new_tokens=0"),
        ("/generate", ask(temperature=-1), "sampling_params.temperature=-1"),
        ("/generate", ask(n=0), "0 texts"),
        ("/generate", ask(n=17), "17 texts, and this server writes 1 to 16"),
        ("/generate", ask(topp=1), "did you mean top_p"),
        ("/generate", ask(ebnf="x"), "use json_schema or regex"),
        ("/generate", ask(max_new_tokens="3"), "sampling_params.max_new_tokens"),
        ("/generate", {**ask(), "logprob_start_len": 0}, "send -1"),
        ("/generate", {**ask(), "lora_path": "x"}, "merge the LoRA"),
        ("/generate", {**ask([PROMPT, OTHER]), "rid": ["a"]}, "1 entries for 2 prompts"),
        ("/generate", {**ask(), "return_logprob": True, "top_logprobs_num": 9}, "at most 2"),
        ("/pause_generation", {"mode": "now"}, "mode='now'"),
        ("/update_weights_from_disk", {}, "model_path"),
        ("/update_weights_from_disk", {"model_path": "org/name"}, "no folder of this machine"),
        ("/update_weights_from_disk", {"model_path": "x", "load_format": "pt"}, "safetensors"),
    ],
)
def test_bad_bodies_are_refused(port, path, body, message):
    status, _, content = send(port, "POST", path, body)
    assert status == 400 and message.split("|")[-1] in content.decode(), content


def test_weights_of_another_shape_are_refused(port, engine, folders):
    body = {"model_path": str(folders / "draft")}
    status, _, content = send(port, "POST", "/update_weights_from_disk", body)
    made = json.loads(content)
    assert status == 400 and made["success"] is False and "those of the engine" in made["message"]
    assert post(port, "/generate", ask())["output_ids"] == text_of(target(), PROMPT).tokens[0]


def test_the_routes_of_a_trainer_are_off_by_default(engine):
    with running(engine) as (_, port):
        for path in ("/pause_generation", "/continue_generation", "/flush_cache", "/abort_request",
                     "/update_weights_from_disk", "/release_memory_occupation",
                     "/resume_memory_occupation"):  # fmt: skip
            status, _, content = send(port, "POST", path, {})
            assert status == 403 and b"start it with --admin" in content
        assert post(port, "/generate", ask())["output_ids"]


def test_memory_is_released_and_taken_back(port, engine, folders, monkeypatch):
    """Texts stay, nothing is compiled, and new weights may come before the caches."""
    compiled, wanted = engine.compiled(), text_of(target(), PROMPT).tokens[0]
    assert post(port, "/generate", ask())["output_ids"] == wanted
    held = jax.tree.leaves((engine.target.params, engine._device.pools))
    post(port, "/release_memory_occupation", {})
    post(port, "/release_memory_occupation", {"tags": ["weights", "cuda_graph"]})
    assert all(leaf.is_deleted() for leaf in held)
    with monkeypatch.context() as patched:
        patched.setattr(sglang, "load", None)  # it would take memory
        body = {"model_path": str(folders / "new")}
        status, _, content = send(port, "POST", "/update_weights_from_disk", body)
        assert status == 400 and b"/resume_memory_occupation" in content
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, port, "/generate", ask())
        post(port, "/resume_memory_occupation", {"tags": ["weights"]})
        assert update(port, folders / "new")["success"] and not waiting.done()
        post(port, "/continue_generation", {})
        with pytest.raises(concurrent.futures.TimeoutError):
            waiting.result(0.2)  # the caches are not there
        post(port, "/resume_memory_occupation", {})
        new = text_of(specjax.load(folders / "new"), PROMPT).tokens[0]
        assert waiting.result(60)["output_ids"] == new != wanted
    update(port, folders / "old")
    post(port, "/pause_generation", {})
    post(port, "/release_memory_occupation", {"tags": ["kv_cache"]})
    post(port, "/resume_memory_occupation", {})
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, port, "/generate", ask())
        with pytest.raises(concurrent.futures.TimeoutError):
            waiting.result(0.2)  # it was paused before
        post(port, "/continue_generation", {})
        assert waiting.result(60)["output_ids"] == wanted
    assert engine.compiled() == compiled
    handle = engine.submit(Request(prompts=[PROMPT], max_new_tokens=90, eos=[]))
    next(iter(handle))
    if not handle.done():
        with pytest.raises(ValueError, match="requests are running"):
            engine.release_memory()
    handle.cancel()
    with pytest.raises(ValueError, match="parts='weights'; pass a list"):
        engine.release_memory("weights")
    assert send(port, "POST", "/release_memory_occupation", {"tags": ["adam"]})[0] == 400


def test_a_pause_and_released_memory_end_apart(port, engine, folders):
    """Requests wait for both, whichever came first; to release nothing stops nobody."""
    wanted = text_of(target(), PROMPT).tokens[0]
    post(port, "/release_memory_occupation", {"tags": ["cuda_graph"]})
    assert post(port, "/generate", ask())["output_ids"] == wanted
    post(port, "/release_memory_occupation", {"tags": ["kv_cache"]})
    assert update(port, folders / "new", abort_all_requests=True)["success"]
    post(port, "/resume_memory_occupation", {})
    new = text_of(specjax.load(folders / "new"), PROMPT).tokens[0]
    assert post(port, "/generate", ask())["output_ids"] == new
    post(port, "/release_memory_occupation", {})
    post(port, "/pause_generation", {})
    post(port, "/resume_memory_occupation", {})
    update(port, folders / "old")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, port, "/generate", ask())
        with pytest.raises(concurrent.futures.TimeoutError):
            waiting.result(0.2)
        post(port, "/continue_generation", {})
        assert waiting.result(60)["output_ids"] == wanted


def test_a_drafter_keeps_the_arrays_of_the_target_that_it_has():
    """A target that drafts for itself in a window has one set of arrays."""
    model = target()
    near = specjax.make_drafter(model, specjax.window_draft(model, 8), num_drafts=2)
    request = Request(prompts=[PROMPT], max_new_tokens=12, seed=3, temperature=1.0, eos=[])
    with Engine(model, {"near": near}, slots=2, capacity=32, chunk=16) as made:
        made.release_memory()
        made.resume_memory()
        text = made.submit(request).result(60)
    assert text.tokens == text_of(model, PROMPT).tokens[0]


def test_weights_of_several_places_come_back_as_they_were():
    """Arrays that are there twice stay one, those of the host stay, and so do those of others."""
    one, held, host = jnp.arange(3.0), jnp.ones(2), np.zeros(4)
    again = take_arrays({"a": one, "b": one, "c": held, "d": host}, {id(held)})
    assert one.is_deleted() and not held.is_deleted()
    back = again()
    assert back["a"] is back["b"] and back["c"] is held and back["d"] is host
    np.testing.assert_array_equal(back["a"], np.arange(3.0))
