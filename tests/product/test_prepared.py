"""A request is prepared on the host alone, its prompts are read twice, and no call climbs."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Iterator

import counted
import jax
import language_models
import pytest
import table_pair
from preparing import prepared

import specjax
from specjax.generation import Request, prepare
from specjax.generation import warmup as warming

pytestmark = pytest.mark.xdist_group("prepared")  # a share takes all of them, or none

PROMPTS = ["the cat the cat", "a dog"]
SETTINGS = {
    "temperature": [0.7, 0.0],
    "top_k": 5,
    "top_p": 0.9,
    "seed": [1, 2],
    "presence_penalty": 0.5,
    "logit_bias": {5: 1.0},
    "bad_words": ["hat"],
    "min_new_tokens": 2,
    "stop": ["zzz"],
    "logprobs": 2,
}
"""Settings with an array for each row, without how to draft."""


def abstract(model: specjax.LanguageModel) -> specjax.LanguageModel:
    """The model with the shapes of its weights instead of the weights."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model.params)
    return dataclasses.replace(model, params=shapes)


@pytest.fixture
def host_only() -> Iterator[None]:
    """Fails if an array is put on a device, or something is compiled."""
    arrays, programs = len(jax.live_arrays()), counted.compilations()
    with jax.transfer_guard("disallow_explicit"):
        yield
    assert len(jax.live_arrays()) <= arrays
    assert counted.compilations() == programs


WAYS = {
    "plain": {"proposer": "none"},
    "the default": {},
    "documents": {"proposer": "ngram", "documents": ["the cat sat"]},
    "a draft": {"draft": "a draft"},
    "a draft that is told how deep": {"draft": "a draft", "num_drafts": [2, 3]},
    "a tree": {"draft": "a draft", "proposer": "tree"},
    "another rule": {"draft": "a draft", "rule": "rejection"},
    "an expression": {"constraint": specjax.Regex("[a-z ]*")},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_request_is_prepared_on_the_host(way, request):
    """The weights of the models are shapes, so nothing can read them."""
    target, options = abstract(language_models.target()), dict(WAYS[way])
    if "draft" in options:
        options["draft"] = abstract(language_models.draft())
    request.getfixturevalue("host_only")
    made = prepare(target, Request(prompts=PROMPTS, max_new_tokens=12, **SETTINGS, **options))
    arrays = (
        made.prompt, made.lengths, made.eos, made.seeds, made.sampling, made.processors,
        made.num_drafts, made.documents,
    )  # fmt: skip
    assert all(not isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(arrays))


REFUSED = {
    "top_k": ({"top_k": -1}, "top_k=-1"),
    "prompts": ({"prompts": ""}, "prompt 0 is empty"),
    "length": ({"max_new_tokens": 10**6}, "reads at most"),
    "drafter": ({"drafter": specjax.NGram()}, "drafter=<a NGram>; pass what a loader"),
    "adapter": ({"adapter": "one"}, "needs a bank of adapters"),
    "rule": ({"rule": "faster"}, "rule='faster', of the type str; pass one of match"),
    "draft": ({"draft": 5}, "draft=5, of the type int"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.usefixtures("host_only")
def test_a_request_is_refused_on_the_host(case):
    """What cannot be used is refused before anything is moved or compiled."""
    options, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        prepare(language_models.target(), Request(**{"prompts": PROMPTS, **options}))


@pytest.fixture
def prefills(monkeypatch) -> list[int]:
    """The rows of all prompts that a decoder has read so far."""
    read, prefill = [], specjax.Decoder.prefill

    def counting(self, params, prompt, *rest, **inputs):
        read.append(len(prompt))
        return prefill(self, params, prompt, *rest, **inputs)

    monkeypatch.setattr(specjax.Decoder, "prefill", counting)
    return read


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["auto", "draft", "none"])
def test_the_first_call_reads_its_prompts_twice(prefills, how, stream):
    """It reads them to warm up and to decode, also where it measures; a later call reads once."""
    target, draft = language_models.target(), language_models.draft()
    options = {"proposer": how, "max_new_tokens": 8, "stream": stream}
    if how != "none":
        options |= {"draft": draft, "num_drafts": 2}
    warming._compiled.clear()
    for wanted in (2, 1):
        prefills.clear()
        list(specjax.generate(target, PROMPTS, **options)) if stream else specjax.generate(
            target, PROMPTS, **options
        )
        assert prefills == [len(PROMPTS)] * wanted


def test_without_memory_for_a_copy_the_prompts_are_read_again(prefills, monkeypatch):
    """What steps cost is then measured from readings of its own."""
    warming._compiled.clear()
    monkeypatch.setattr(warming, "fits", lambda needed, devices: needed < 1)
    specjax.generate(language_models.target(), PROMPTS, num_drafts=2, max_new_tokens=8)
    assert len(prefills) >= 3


def test_a_grammar_is_measured_from_a_prompt_of_its_own(prefills):
    """The rows of a grammar end, so what steps cost is measured without it."""
    pytest.importorskip("llguidance")
    warming._compiled.clear()
    how = {"constraint": specjax.Grammar('start: "the cat"'), "num_drafts": 2, "max_new_tokens": 8}
    out = specjax.generate(language_models.target(), PROMPTS, **how)
    assert out.text == ["the cat"] * 2 and len(prefills) >= 3


def test_the_weights_are_placed_after_the_request_was_checked(monkeypatch):
    """`generate` checks the whole request before it makes the parameters of the proposer."""
    moved = []
    monkeypatch.setattr(warming, "place", lambda *arguments: moved.append(arguments))
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        specjax.generate(language_models.target(), PROMPTS, max_new_tokens=0)
    assert moved == []


# --- the route of a call --------------------------------------------------------------------------

PACKAGE = pathlib.Path(specjax.__file__).parent
ROUTE = ("generation", "drafters", "decoding")
"""The rooms that a call passes through; below them are the models, proposers and rules of the
contract, and the functions that these rooms use."""


@functools.cache
def module_of(name: str) -> str | None:
    """The file of the library that has this name.

    Those of `_internal` are left out as JAX is: they run functions that they are given.
    """
    path = pathlib.Path(name)
    if not path.is_relative_to(PACKAGE) or path.is_relative_to(PACKAGE / "_internal"):
        return None
    return str(path.relative_to(PACKAGE))


def test_a_call_is_a_straight_line(monkeypatch, tmp_path):
    """`generate(target, prompt, draft=draft)` runs through at most 14 files of its rooms, and no
    function calls back into a file that waits for it.

    The contract is left out: proposers get `Context.warp` from the decoder, and a class that
    declares its properties is called by the contract and calls it.
    """
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path))
    warming._compiled.clear()
    files: list[str] = []
    climbs = set()

    def watch(frame, event, argument):
        here = module_of(frame.f_code.co_filename) if event == "call" else None
        if here is None or here.startswith("contract/"):
            return
        if here not in files:
            files.append(here)
        before, callers = frame.f_back, []
        while before is not None:
            if (module := module_of(before.f_code.co_filename)) is not None:
                callers.append(module)
            before = before.f_back
        if callers and callers[0] != here and here in callers:
            climbs.add((callers[0], here, frame.f_code.co_name))

    target, draft = table_pair.target(), table_pair.draft()
    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        specjax.generate(target, "the cat the cat", draft=draft, max_new_tokens=9)
    finally:
        sys.setprofile(before)
    route = [file for file in files if file.startswith(ROUTE)]
    assert len(route) <= 14, route
    assert {climb for climb in climbs if climb[2] != "_warp"} == set()


def test_a_named_draft_is_loaded_before_the_request_is_prepared():
    """`prepare` takes loaded models only."""
    with pytest.raises(ValueError, match=r"draft=.*, of the type str"):
        prepare(language_models.target(), Request(prompts="a", draft="folder"))
    with pytest.raises(ValueError, match="draft='no such folder' cannot be loaded"):
        prepared(language_models.target(), "a", draft="no such folder")
