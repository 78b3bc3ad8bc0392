"""An engine whose requests expect a text: the tokens are drafts, and never change the text."""

from __future__ import annotations

import functools
from typing import Any

import counted
import load
import numpy as np
import pytest
import serving
from toys import TABLES
from toys import TRANSFORMERS as toys

import specjax
from specjax import Request
from specjax.models import LanguageModel
from specjax.serve import Engine, Served

pytestmark = pytest.mark.xdist_group("serve expected")  # a share takes all of them, or none

DEPTH, NEW = 6, 26
DRAFTERS = ("none", "lookup", "draft", "tree", "medusa", "lookup+draft")
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 5, "top_k": 40},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.4,
                  "frequency_penalty": 0.2, "logit_bias": {7: 1.0}, "min_new_tokens": 3},
    "constraint": {"temperature": 1.0, "constraint": specjax.Regex("[a-z ]{4,30}")},
    "stops": {"temperature": 1.0, "stop": ["e", "\n"], "seed": 2},
}  # fmt: skip


@functools.cache
def engine() -> Engine:
    """The pair of tables with all drafters, and room for expected texts."""
    return Engine(
        serving.models()[0], serving.drafters(), slots=3, capacity=load.CAPACITY, chunk=load.CHUNK,
        logprobs=load.LOGPROBS, constraint_size=(256, 160), expected=DEPTH, waiting=512,
    )  # fmt: skip


def ask(drafter: str, setting: str, **more: Any) -> Request:
    adapter = {"adapter": "one"} if "medusa" in drafter else {}
    fields = {"prompts": "def main(", "max_new_tokens": NEW, "proposer": drafter, **adapter}
    return Request(**{**fields, **SETTINGS[setting], **more})


def told(served: Served) -> tuple[Any, ...]:
    return served.tokens, served.text, served.finish


def guesses_of(tokens: list[int]) -> dict[str, list[int]]:
    """Texts that may be expected where `tokens` will come."""
    mixed = np.random.default_rng(0).permutation(tokens).tolist()
    return {
        "perfect": tokens, "shuffled": mixed, "short": tokens[: len(tokens) // 2],
        "long": [*tokens, *range(1, 28), *[1] * 200], "empty": [], "late": [7, *tokens],
        "one wrong": [*tokens[:3], (tokens[3] + 1) % 20 if tokens[3:] else 1, *tokens[4:]],
    }  # fmt: skip


def test_what_is_expected_never_changes_the_text():
    """With every drafter, kind of setting, index of `n` and kind of expected text, all at once."""
    engine.cache_clear()  # the programs of an older one may have been forgotten to save memory
    made, asked = engine(), []
    before, compiled = made.compiled(), counted.compilations()
    for setting in SETTINGS:
        plain = [made.submit(ask("none", setting), index).result(60) for index in range(2)]
        for index, served in enumerate(plain):
            for number, (kind, tokens) in enumerate(guesses_of(served.tokens).items()):
                drafter = DRAFTERS[(number + index) % len(DRAFTERS)]
                request = ask(drafter, setting, expected=[tokens])
                asked.append((setting, kind, drafter, told(served), made.submit(request, index)))
        for drafter in DRAFTERS[1:]:
            request = ask(drafter, setting, expected=[plain[0].tokens])
            asked.append((setting, "perfect", drafter, told(plain[0]), made.submit(request)))
    wrong = [case[:3] for *case, handle in asked if told(handle.result(60)) != case[3]]
    assert wrong == []
    assert (made.compiled(), counted.compilations()) == (before, compiled)
    used = {guess.drafter for *_, handle in asked for guess in handle.result().guesses}
    assert used >= {"expected", "draft", "tree"}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_perfect_text_gives_a_whole_chain_in_every_pass(drafter):
    text = engine().submit(ask("none", "sampled", eos=[])).result(60)
    served = engine().submit(ask(drafter, "sampled", eos=[], expected=[text.tokens])).result(60)
    assert served.tokens == text.tokens
    assert served.stats.target_passes == -(-NEW // (DEPTH + 1))
    assert {guess.drafter for guess in served.guesses if guess.depth} == {"expected"}


def test_another_drafter_follows():
    """Behind a short text, and while a row differs from the text that is expected of it."""
    text = engine().submit(ask("none", "sampled", eos=[])).result(60)
    for expected in (text.tokens[:9], [*text.tokens[:9], 1, 2, 3]):
        request = ask("draft", "sampled", eos=[], expected=[expected])
        served = engine().submit(request).result(60)
        assert served.tokens == text.tokens
        drafted = [guess.drafter for guess in served.guesses if guess.depth]
        assert set(drafted[:6]) == {"expected"} and "draft" in drafted[6:]


def test_fewer_drafts_on_request():
    text = engine().submit(ask("none", "sampled", eos=[])).result(60)
    for most in (0, 2):
        request = ask("lookup", "sampled", eos=[], expected=[text.tokens], num_drafts=most)
        served = engine().submit(request).result(60)
        assert served.tokens == text.tokens
        assert served.stats.target_passes == -(-NEW // (most + 1))


def test_pages():
    """Rows that are set back meet the text that is expected of them again."""
    target = LanguageModel(toys.model(), toys.weights(), None, (toys.EOS,), "toy")
    made = Engine(
        target, slots=3, capacity=64, chunk=16, cache_tokens=7 * 16 + 1, page=16, expected=4
    )

    def request(first: int, **more: Any) -> Request:
        prompt = [[(first + n) % 20 for n in range(5 + first)]]
        return Request(prompts=prompt, max_new_tokens=40, temperature=1.0, seed=first, eos=[],
                       proposer="none", **more)  # fmt: skip

    with made:
        plain = [made.submit(request(n)).result(60) for n in range(6)]
        before = made.load().set_back
        handles = [
            made.submit(request(n, expected=[guesses_of(one.tokens)[kind]]))
            for n, one in enumerate(plain)
            for kind in ("perfect", "one wrong")
        ]
        served = [handle.result(60) for handle in handles]
        assert made.load().set_back > before
        assert [one.tokens for one in served[::2]] == [one.tokens for one in plain]
        assert [one.tokens for one in served[1::2]] == [one.tokens for one in plain]
        alone = made.submit(request(0, expected=[plain[0].tokens])).result(60)
        assert alone.stats.target_passes == 8


def test_without_room_nothing_is_compiled_or_carried():
    """An engine has as many programs as before, and the arrays of its rows are no larger; with as
    many drafts as its drafter makes it compiles no further program either."""
    target = LanguageModel(TABLES.model(), TABLES.weights(), None, (), "toy")
    drafters = {"lookup": specjax.methods.BoundDrafter(specjax.NGram(4))}
    programs, state = [], None
    for room in (None, 4):
        made = Engine(target, drafters, slots=1, capacity=48, chunk=16, expected=room)
        programs.append((made.compiled(), sorted(made._device._decoders)))
        if room is None:
            state = made._device.state
            with pytest.raises(ValueError, match="no room for it: make it with expected=8"):
                made.submit(Request(prompts=[[1]], max_new_tokens=4, expected=[[3, 4]]))
        made.close()
    assert programs[0] == programs[1]
    assert state is not None
    assert len(state.proposer.own) == 1 and state.proposer.choice.shape == (1, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expected": [[1], [2]]}, "expected has 2 entries for 1 prompts"),
        ({"expected": [1, 2]}, "expected"),
        ({"expected": ["text"]}, "expected holds the text 'text'"),
        ({"expected": [[1, 10**6]]}, "expected: text 0 holds token ids from 1"),
        ({"expected": 7}, "expected=7"),
        ({"expected": [[1]], "num_drafts": DEPTH + 1}, r"\[0, 6\], since expected drafts 6"),
    ],
)
def test_bad_expectations_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        engine().submit(ask("none", "greedy", **fields))


@pytest.mark.parametrize("room", [0, 255, 2.5, True, "8"])
def test_a_room_that_cannot_be_used_is_refused(room):
    target = LanguageModel(TABLES.model(), TABLES.weights(), None, (), "toy")
    with pytest.raises(ValueError, match="expected="):
        Engine(target, slots=1, capacity=48, chunk=16, expected=room)
