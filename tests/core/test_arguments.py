"""Every argument of `generate` is used as documented, or refused by name before anything runs.

`argument_meanings.py` states a second time what each value means. Values come from a pool of odd
ones.
"""

import dataclasses
import datetime
import fractions
import inspect
import math
import re

import counted
import jax.numpy as jnp
import language_models
import numpy as np
import pytest
from argument_meanings import MEANINGS, REFUSED, prompts
from preparing import prepared

import specjax
from specjax._internal.checks import items, number, shown

DEFAULTS = {name: p.default for name, p in inspect.signature(specjax.generate).parameters.items()}


class Unhashable:
    __hash__ = None

    def __call__(self, *arguments):
        raise RuntimeError("not to be called")


ATOMS = [
    None, True, False, np.True_, math.nan, math.inf, -math.inf, -1, 0, 1, 2, 7, 2.5, 0.5, 1.0, -0.5,
    1e39, -1e39, 10**30, -(10**30), 10**400, 10**5000, 319, 320, 513, 2**32 - 1, 2**32, "x", "",
    "match", "the cat", "\ud800", b"x", b"", bytearray(b"ab"), 1 + 2j, ..., NotImplemented,
    object(), int, specjax.NGram, specjax.Match, len, lambda logits: logits, Unhashable(), range(2),
    range(0), fractions.Fraction(1, 2), datetime.date(2026, 1, 1), np.float16(0.5),
    np.float64(0.25), np.int8(-3), np.uint32(5), np.array(3), np.array(2.5), np.array(True),
    np.array([1, 2]), np.array([0.5, 1.0]), np.array([1.5, np.nan]), np.zeros((2, 2)),
    np.ones((2, 2), int), np.array([True, False]), np.array(["a", "b"]), np.array([1 + 2j]),
    np.array([None, 1], object), np.array("x"), np.array([], int), np.datetime64("2026-01-01"),
    jnp.int32(3), jnp.bfloat16(0.5), jnp.arange(2), jnp.ones((2, 3)), {}, {1: 2.0}, {1.5: 1},
    {"a": 1}, {5: math.nan}, {5: -math.inf}, {5: math.inf}, {320: 1.0}, {5: 1e39}, {True: 1},
    {3: "x"}, set(), {1}, (i for i in ()), {"role": "user", "content": "hi"}, {"role": 5},
    {"content": "hi"},
]  # fmt: skip


def odd(rng, depth=0):
    """An atom, or a possibly nested list of atoms."""
    if depth < 3 and rng.random() < (0.6 if depth == 0 else 0.25):
        made = [odd(rng, depth + 1) for _ in range(rng.integers(0, 4))]
        return tuple(made) if rng.random() < 0.3 else made
    return ATOMS[rng.integers(len(ATOMS))]


@pytest.fixture(scope="module")
def given():
    """Valid arguments with two prompts."""
    target = language_models.target()
    template = b"{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    target = dataclasses.replace(target, files={"chat_template.jinja": template})
    return {**DEFAULTS, "target": target, "prompts": [[1, 2, 3], [4]]}


def refusal(given, changes):
    """The checked call, or None if a ValueError names a changed argument before compilation."""
    before = counted.compilations()
    try:
        return prepared(**{**given, **changes})
    except Exception as error:
        assert counted.compilations() == before
        assert type(error) is ValueError, f"{type(error).__name__} of {changes}: {error}"
        message = str(error)
        named = message.replace("prompt ", "prompts ")
        assert any(re.search(rf"\b{name}\b", named) for name in changes), f"{changes}: {message}"
        assert "\n" not in message and len(message) < 600, message
        return None


def changed(name, value):
    """Replace an argument; messages replace the prompts."""
    return (
        {name: value, "prompts": None}
        if name == "messages" and value is not None
        else {name: value}
    )


def test_every_argument_has_a_meaning_here():
    """A new argument must be added to the table."""
    assert set(MEANINGS) == set(DEFAULTS)


@pytest.mark.parametrize("name", MEANINGS)
def test_a_value_is_used_as_it_says_or_refused_by_name(given, name):
    """All atoms and 300 lists of them are tried."""
    meaning, holds = MEANINGS[name]
    rng = np.random.default_rng(sorted(MEANINGS).index(name))
    refused = 0
    for value in [*ATOMS, *(odd(rng) for _ in range(300))]:
        changes, wanted = changed(name, value), meaning(value)
        if name == "messages" and value is None:
            wanted = prompts(given["prompts"])
        call = refusal(given, changes)
        assert (call is None) == (wanted is REFUSED), (
            name,
            value,
            "refused" if call is None else "accepted",
        )
        assert call is None or holds(call, wanted), (name, value)
        refused += call is None
    assert refused > 50


def test_several_at_once(given):
    """A call with three odd arguments is valid if all three are; otherwise one is named."""
    rng, stood = np.random.default_rng(0), 0
    names = [name for name in MEANINGS if name != "messages"]
    for _ in range(600):
        chosen = [names[i] for i in rng.choice(len(names), 3, replace=False)]
        changes = {name: given[name] if rng.random() < 0.6 else odd(rng) for name in chosen}
        call = refusal(given, changes)
        if "prompts" not in changes:
            alone = [refusal(given, {name: value}) is not None for name, value in changes.items()]
            assert call is None or all(alone), changes
        stood += call is not None
    assert 50 < stood < 550


class Lookalike:
    """Has what a proposer has, and does not inherit from one."""

    num_nodes, max_depth, is_chain, draws = 1, 0, True, False
    init = propose = observe = None
    __hash__ = None


# Arguments, and words of the error: the name, the value, and the cure.
CASES = [
    ({"prompts": 5}, ["prompts=5", "a list of texts"]),
    ({"prompts": b"x"}, ["prompts=b'x'", "a list of texts"]),
    ({"prompts": [[1.0]]}, ["prompt 0 holds 1.0", "whole numbers"]),
    ({"num_drafts": 2.5}, ["num_drafts=2.5", "a whole number, 0 (plain) or greater"]),
    ({"num_drafts": "x"}, ["num_drafts='x'", "a whole number"]),
    ({"num_drafts": True}, ["num_drafts=True", "a whole number"]),
    ({"num_drafts": -1, "proposer": specjax.NGram()}, ["num_drafts=-1", "0 (plain) or greater"]),
    ({"proposer": specjax.NGram}, ["proposer=<the class NGram>", "NGram(...)"]),
    ({"proposer": 5}, ["proposer=5", "pass one such as", "NGram()"]),
    ({"proposer": Lookalike()}, ["proposer=", "pass one such as", "NGram()"]),
    ({"rule": "lossy"}, ["rule='lossy'", "match, rejection"]),
    ({"rule": specjax.Rejection}, ["rule=<the class Rejection>", "Match()"]),
    ({"seed": "a"}, ["seed='a'", "whole number"]),
    ({"seed": 1.5}, ["seed=1.5", "whole number"]),
    ({"seed": True}, ["seed=True", "whole number"]),
    ({"messages": "hi", "prompts": None}, ["messages='hi'", '"role"']),
    ({"max_new_tokens": math.nan}, ["max_new_tokens=nan", "at least 1"]),
    ({"max_new_tokens": 8.0}, ["max_new_tokens=8.0", "whole number"]),
    ({"eos": 19.7}, ["eos=19.7", "0 to 319"]),
    ({"eos": [[1], 2]}, ["eos=[1]", "a list of them"]),
    ({"logit_bias": {1.5: 1}}, ["logit_bias", "1.5", "0 to 319"]),
    ({"logit_bias": {1: "x"}}, ["logit_bias={1: 'x'}", "finite"]),
    ({"bad_words": [5]}, ["bad_words holds 5", "token-id lists"]),
    ({"top_k": 10**30}, ["top_k=1000", "whole number"]),
    ({"temperature": 1e39}, ["temperature=1e+39"]),
    ({"temperature": "hot"}, ["temperature='hot'", "0 (greedy) or greater"]),
    ({"stop": 5}, ["stop=5", "a list of texts"]),
    ({"stream": "yes"}, ["stream='yes'", "True or False"]),
    ({"mesh": "data=2"}, ["mesh='data=2'", "make_mesh"]),
    ({"logits_processor": lambda logits: logits}, ["logits_processor", "TypeError", "counts [V]"]),
    ({"logits_processor": 5}, ["logits_processor=5", "counts [V]"]),
    ({"target": None}, ["target=None", "specjax.load"]),
    ({"draft_dtype": np.ones(2)}, ["draft_dtype", "int8"]),
    ({"adapter": [[]], "proposer": None}, ["adapter", "MedusaBank"]),
]


@pytest.mark.parametrize(("changes", "words"), CASES, ids=lambda case: str(case)[:40])
def test_the_message_names_argument_value_and_cure(given, changes, words):
    """The error comes from `generate`, before anything is compiled."""
    before = counted.compilations()
    with pytest.raises(ValueError) as caught:
        specjax.generate(**{**given, **changes})
    assert [word for word in words if word not in str(caught.value)] == [], caught.value
    assert counted.compilations() == before


def test_numbers_and_lists_of_every_library():
    """NumPy and JAX numbers count; booleans and texts are no numbers, bytes are no list."""
    for value in (3, np.int8(3), np.array(3), jnp.int32(3)):
        assert (number(value), type(number(value))) == (3, int)
    for value in (0.5, np.float16(0.5), np.array(0.5), jnp.bfloat16(0.5)):
        assert (number(value), type(number(value))) == (0.5, float)
    for value in (True, np.True_, np.array(True), "3", b"3", None, [3], np.array([3]), 1j, int):
        assert number(value) is None
    for value in ([1, 2], (1, 2), range(1, 3), np.array([1, 2]), jnp.array([1, 2])):
        assert items(value) == [1, 2]
    for value in ("ab", b"ab", bytearray(b"ab"), {1: 2}, {1, 2}, 5, np.array(5), None, list):
        assert items(value) is None


def test_a_value_is_shown_in_a_few_words():
    """It takes one line, without a model's arrays and with few digits."""
    assert shown(np.zeros((50, 50))).count("\n") == 0 and len(shown(list(range(10**6)))) < 100
    assert shown(10**5000) == "<a very long int>"
    assert shown(specjax.NGram(3)) == "<a NGram>" and shown(specjax.NGram) == "<the class NGram>"
