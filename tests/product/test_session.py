"""Turns of a session: what is read, the text and the drafts of a call with the whole text, edits,
and what is refused."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
import rings
from hybrid_model import MODEL, weights
from toys import TABLES as toys

import specjax
from specjax import Session
from specjax.caches import prefill
from specjax.decoding import turns
from specjax.methods import BoundDrafter
from specjax.models import LanguageModel

pytestmark = pytest.mark.xdist_group("session")  # a share takes all of them, or none

NAMES = ("none", "draft 3", "draft tree", "eagle3", "eagle3 tree", "mtp layers", "medusa tree",
         "block draft", "universal", "adaptive", "first of", "ngram")  # fmt: skip


@functools.cache
def target() -> LanguageModel:
    return LanguageModel(toys.model(), toys.weights(), None, (toys.EOS,), "toy")


def session(name: str, **options: Any) -> Session:
    drafter = specjax.Drafter(*toys.CASES[name], name)
    settings: dict[str, Any] = {"capacity": 64, "eos": [], "max_new_tokens": 10}
    return Session(target(), drafter=drafter, **settings, **options)


def seen(out: Any) -> tuple[Any, ...]:
    stats = out.stats
    return out.tokens, stats.target_passes, stats.accepted, stats.tested


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 20, length).tolist()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", [0, 1])
def test_later_turns_read_only_what_is_new(name: str, temperature: int):
    """With the tokens, passes and drafts of a session that reads the whole text."""
    options: dict[str, Any] = {"temperature": temperature, "seed": 3}
    one = session(name, **options)
    prompt = text(0, 9)
    for turn in range(3):
        before = len(prompt)
        out = one.generate([prompt])
        assert one.kept + one.read == before - 1
        if turn:
            assert one.read == 4, "an answer or an earlier turn was read again"
        whole = session(name, **options).generate([prompt])
        if name != "adaptive":  # its choices follow the acceptance of earlier turns
            assert seen(out) == seen(whole)
        plain = specjax.generate(
            target(), [prompt], proposer="none", max_new_tokens=10, eos=[], **options
        )
        assert out.tokens == plain.tokens
        prompt = [*prompt, *out.tokens[0], *text(turn, 4)]


def test_an_edited_turn_keeps_the_longest_common_beginning():
    """Also where the text is shorter, or the same again; with a drafter that reads features the
    beginning ends where a turn did."""
    for name, kept in (("draft 3", 15), ("ngram", 15), ("eagle3", 9), ("universal", 9)):
        one = session(name)
        first = text(0, 10)
        reply = one.generate([first]).tokens[0]
        second = [*first, *reply[:5], 2, 3]
        out = one.generate([second])
        assert one.kept == kept, name
        assert seen(out) == seen(session(name).generate([second]))
        again = one.generate([second])
        assert seen(again) == seen(out) and one.read <= 1
        other = [19 - first[0], *second[1:]]
        assert seen(one.generate([other])) == seen(session(name).generate([other]))
        assert one.kept == 0


def forgetful(kind: str, monkeypatch: pytest.MonkeyPatch) -> LanguageModel:
    """A target whose cache cannot be cut."""
    if kind == "states":
        return LanguageModel(MODEL, weights(), None, (), "states")
    monkeypatch.setattr(prefill, "CHUNK", rings.CHUNK)
    monkeypatch.setattr(turns, "WIDTHS", (4, rings.CHUNK))
    return LanguageModel(rings.TARGET, rings.WEIGHTS, None, (), "rings")


@pytest.mark.parametrize("kind", ["states", "rings"])
def test_what_cannot_be_cut_goes_back_to_the_end_of_a_turn(
    kind: str, monkeypatch: pytest.MonkeyPatch
):
    model = forgetful(kind, monkeypatch)
    lookup = BoundDrafter(specjax.NGram(3, min_ngram=1))
    capacity = {"states": 60, "rings": 150}[kind]

    def new() -> Session:
        return Session(model, capacity=capacity, drafter=lookup, max_new_tokens=8, eos=[])

    one, prompt = new(), text(0, 9 if kind == "states" else 60)
    ends = []
    for turn in range(3):
        out = one.generate([prompt])
        assert one.read == (4 if turn else len(prompt) - 1)
        assert out.tokens == new().generate([prompt]).tokens
        prompt = [*prompt, *out.tokens[0]]
        ends.append(len(prompt) - 1)
        prompt += text(turn, 4)
    edited = [*prompt[: ends[0] + 3], 1, 2, 3, 4, 5]
    out = one.generate([edited])
    assert one.kept == ends[0], "the end of the first turn"
    assert out.tokens == new().generate([edited]).tokens
    again = one.generate([edited])
    assert again.tokens == out.tokens and one.read == 0
    held = one._held
    assert held is not None
    one._held = jax.tree.map(lambda x: x * 0 if x.ndim > 1 else x, held)
    longer = [*edited, *out.tokens[0], 7]
    faulty = one.generate([longer])
    assert one.read == 1 and faulty.tokens != new().generate([longer]).tokens


def test_a_stream_that_is_left_is_read_again():
    """A text of a tokenizer, and stop strings; the tokens after them stay in the cache."""
    tiny = specjax.load(specjax.shipped("tiny/target"))
    one = Session(tiny, capacity=96, proposer="ngram", max_new_tokens=40, eos=[])
    prompt = "import os"
    wanted = specjax.generate(tiny, prompt, proposer="none", max_new_tokens=40, eos=[])
    assert next(one.generate(prompt, stream=True))
    stream = one.generate(prompt, stream=True)
    assert one.kept == 0 and "".join(stream) == wanted.text[0]
    stop = wanted.text[0][12:16]
    stopped = one.generate(prompt, stop=stop)
    assert one.read <= 1 and stopped.text[0] == wanted.text[0].split(stop)[0]
    assert one.generate(prompt).tokens == wanted.tokens and one.read <= 1


def test_the_turn_that_began_last_is_kept():
    """Whichever was asked for or has ended last; `forget` ends what a stream would keep."""
    tiny = specjax.load(specjax.shipped("tiny/target"))
    settings: dict[str, Any] = {
        "proposer": "none", "max_new_tokens": 24, "temperature": 1, "eos": []
    }  # fmt: skip
    one, texts = Session(tiny, capacity=96, **settings), ("import os", "def f(")
    wanted = [specjax.generate(tiny, text, **settings).text[0] for text in texts]
    assert wanted[0] != wanted[1]
    first, second = (one.generate(text, stream=True) for text in texts)
    begun = next(second)
    assert "".join(first) == wanted[0] and begun + "".join(second) == wanted[1]
    assert one.generate(texts[0]).text[0] == wanted[0] and one.read <= 1
    stream = one.generate(texts[0], stream=True)
    assert next(stream) and one.kept
    one.forget()
    assert list(stream) and one.generate(texts[0]).text[0] == wanted[0] and one.kept == 0


def test_a_constraint_of_all_turns_has_room():
    """Its shortest text may be longer than one token, but not than the capacity."""
    tiny = specjax.load(specjax.shipped("tiny/target"))
    settings = {"max_new_tokens": 20, "constraint": specjax.Regex("import os")}
    one = Session(tiny, capacity=64, proposer="ngram", **settings)
    assert [one.generate(text).text[0] for text in ("x", "x y")] == ["import os"] * 2
    with pytest.raises(ValueError, match="max_new_tokens=1 is too small: the shortest text"):
        Session(tiny, capacity=2, proposer="ngram", **settings)


@pytest.mark.parametrize(
    ("options", "turn", "message"),
    [
        ({"capacity": 10**6}, {}, r"capacity=1000000, and toy reads at most \d+ tokens: pass"),
        ({"prompts": [[1]]}, {}, "prompts are of a turn: pass them to generate"),
        ({"temprature": 1}, {}, "did you mean temperature"),
        ({}, {"proposer": "ngram"}, "proposer='ngram' is for all turns of a session"),
        ({}, {"draft_window": 4}, "draft_window=4 is for all turns of a session"),
        ({}, {"synthetic_acceptance": 0.5}, "synthetic_acceptance=0.5 is for all turns"),
        ({}, {"prompts": [[1], [2]]}, "2 prompts, and a session holds one text"),
        (
            {"capacity": 50},
            {"prompts": [[1] * 45]},
            "45 tokens, .* make 55, .* holds 50: pass max_",
        ),
        ({}, {"expected": [[1]]}, "expected=.*is for generate"),
    ],
)
def test_refused(options: dict[str, Any], turn: dict[str, Any], message: str):
    made: dict[str, Any] = {"capacity": 64, "max_new_tokens": 10, **options}
    asked: dict[str, Any] = {"prompts": [[1]], **turn}
    with pytest.raises(ValueError, match=message):
        Session(target(), **made).generate(**asked)
