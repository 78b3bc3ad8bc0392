"""Whatever is passed to `generate` is used as it says, or refused by name before anything runs.

What a value means is written down here a second time, by hand.  Values come from a pool of odd ones.
"""

import dataclasses
import datetime
import fractions
import inspect
import math
import re

import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.arguments import items, number, shown
from specjax.call import check

DEFAULTS = {name: p.default for name, p in inspect.signature(specjax.generate).parameters.items()}
ROWS, VOCAB, CONTEXT, NEW = 2, 320, 512, 128
REFUSED = object()
LARGEST = float(np.finfo(np.float32).max)


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
    """An atom, or a list of such, perhaps of lists."""
    if depth < 3 and rng.random() < (0.6 if depth == 0 else 0.25):
        made = [odd(rng, depth + 1) for _ in range(rng.integers(0, 4))]
        return tuple(made) if rng.random() < 0.3 else made
    return ATOMS[rng.integers(len(ATOMS))]


# --- what a value means, by hand ------------------------------------------------------------------


def listed(value):
    """Its entries, if it is a list in any of the spellings that are allowed; else None."""
    if type(value) in (list, tuple, range):
        return list(value)
    return (
        list(np.asarray(value))
        if isinstance(value, np.ndarray | jax.Array) and value.ndim
        else None
    )


def real(value):
    """A number of Python's, or REFUSED."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        name = value.dtype.name
        return (
            REFUSED
            if value.ndim or not re.match("u?int|float|bfloat", name)
            else real(value.item())
        )
    return value if type(value) in (int, float) else REFUSED


def setting(accept, whole=False, lists_of_one=True):
    """One number for all rows, or one a row."""

    def meaning(value):
        found = listed(value)
        found = (
            [value] * ROWS
            if found is None
            else found * ROWS
            if lists_of_one and len(found) == 1
            else found
        )
        numbers = [real(entry) for entry in found]
        if len(numbers) != ROWS or any(
            n is REFUSED or (whole and type(n) is float) for n in numbers
        ):
            return REFUSED
        return numbers if all(abs(n) <= LARGEST and accept(n) for n in numbers) else REFUSED

    return meaning


def count(least, most):
    def meaning(value):
        found = real(value)
        return found if type(found) is int and least <= found <= most else REFUSED

    return meaning


def only(*allowed):
    return lambda value: value if any(value is one for one in allowed) else REFUSED


def or_none(meaning, default=None):
    return lambda value: default if value is None else meaning(value)


def ids(value, empty=True):
    found = listed(value)
    found = None if found is None else [real(entry) for entry in found]
    good = (
        found is not None
        and all(type(n) is int and 0 <= n < VOCAB for n in found)
        and (empty or found)
    )
    return found if good else REFUSED


def text(value):
    """Of a prompt; a lone surrogate has no bytes."""
    if isinstance(value, str) and value and "\ud800" not in value:
        return folders.tokenizer().encode(value).ids
    return REFUSED


def prompts(value):
    found = [value] if isinstance(value, str) else listed(value)
    if not found:
        return REFUSED
    rows = [text(row) if isinstance(row, str) else ids(row, empty=False) for row in found]
    return REFUSED if REFUSED in rows else rows


def eos(value):
    found = listed(value)
    found = [value] if found is None else found
    if found and all(listed(row) is not None for row in found):
        rows = [ids(row) for row in found]
        return rows if len(rows) == ROWS and REFUSED not in rows else REFUSED
    return REFUSED if (one := ids(found)) is REFUSED else [one] * ROWS


def stop(value):
    found = [value] if isinstance(value, str) else listed(value)
    return REFUSED if found is None or not all(isinstance(t, str) and t for t in found) else found


def bias(value):
    found = listed(value)
    rows = [value] * ROWS if found is None else found
    if len(rows) != ROWS or not all(isinstance(row, dict) for row in rows):
        return REFUSED
    for row in rows:
        numbers = [real(added) for added in row.values()]
        if ids(list(row)) is REFUSED or any(n is REFUSED for n in numbers):
            return REFUSED
        if not all(n == -math.inf or abs(n) <= LARGEST for n in numbers):
            return REFUSED
    return rows


def bad_words(value):
    """How many phrases; a text stands for two."""
    found = listed(value)
    if found is None:
        return REFUSED
    for word in found:
        if isinstance(word, str):
            if not word.strip() or text(word) is REFUSED:
                return REFUSED
        elif ids(word, empty=False) in (REFUSED, [0]):  # 0 ends a text
            return REFUSED
    return found


def messages(value):
    found = listed(value)
    if not found:
        return REFUSED
    chats = [found] if isinstance(found[0], dict) else found
    for chat in chats:
        turns = listed(chat)
        if not turns or not all(isinstance(m, dict) and type(m.get("role")) is str for m in turns):
            return REFUSED
    return chats


def same_numbers(read):
    return lambda call, wanted: np.array_equal(read(call), np.array(wanted, read(call).dtype))


def penalty(name, off):
    """None where it is off for all rows."""

    def holds(call, wanted):
        found = call.processors and call.processors.penalties
        given = np.full(ROWS, off) if found is None else getattr(found, name)
        return np.array_equal(given, np.array(wanted, np.float32))

    return holds


def biased(call, wanted):
    found = np.zeros((ROWS, VOCAB)) if call.processors is None else call.processors.bias
    given = np.zeros((ROWS, VOCAB), np.float32)
    for row, entries in zip(given, wanted, strict=True):
        for token, added in entries.items():
            row[token] = real(added)
    return np.array_equal(found, given)


def anything(call, wanted):
    return True


# Each argument: what a value means or REFUSED, and does the checked call hold it?
MEANINGS = {
    "target": (only(), anything),
    "prompts": (
        prompts,
        lambda c, w: [c.prompt[i, :n].tolist() for i, n in enumerate(c.lengths)] == w,
    ),
    "messages": (messages, lambda c, w: len(c.lengths) == len(w)),
    "draft": (only(None), lambda c, w: c.decoder.proposer.max_depth == 0),
    "draft_dtype": (only(None), anything),
    "proposer": (only(None), lambda c, w: c.decoder.proposer == specjax.NoProposer()),
    "adapter": (only(None), anything),
    "rule": (only(None), lambda c, w: c.decoder.rule == specjax.Match()),
    "num_drafts": (
        or_none(setting(lambda n: 0 <= n <= CONTEXT, whole=True, lists_of_one=False)),
        lambda c, w: c.num_drafts is None if w is None else c.num_drafts.tolist() == w,
    ),
    "max_new_tokens": (count(1, CONTEXT - 3), lambda c, w: c.new == w),
    "temperature": (
        or_none(setting(lambda n: n >= 0), [0] * ROWS),
        same_numbers(lambda c: c.sampling.temperature),
    ),
    "top_k": (
        or_none(setting(lambda n: 0 <= n < 2**31, whole=True), [0] * ROWS),
        same_numbers(lambda c: c.sampling.top_k),
    ),
    "top_p": (
        or_none(setting(lambda n: 0 < n <= 1), [1] * ROWS),
        same_numbers(lambda c: c.sampling.top_p),
    ),
    "min_p": (
        or_none(setting(lambda n: 0 <= n <= 1), [0] * ROWS),
        same_numbers(lambda c: c.sampling.min_p),
    ),
    "repetition_penalty": (or_none(setting(lambda n: n > 0), [1] * ROWS), penalty("repetition", 1)),
    "presence_penalty": (setting(lambda n: True), penalty("presence", 0)),
    "frequency_penalty": (setting(lambda n: True), penalty("frequency", 0)),
    "logit_bias": (or_none(bias, [{}] * ROWS), biased),
    "bad_words": (bad_words, lambda c, w: (c.processors is not None) == bool(w)),
    "logits_processor": (only(None), lambda c, w: c.decoder.logits_processor is None),
    "min_new_tokens": (
        setting(lambda n: 0 <= n <= NEW, whole=True),
        lambda c, w: (c.processors.min_length.tolist() if c.processors else [0] * ROWS) == w,
    ),
    "eos": (
        or_none(eos, [[0]] * ROWS),
        lambda c, w: (
            [sorted(set(row[row >= 0].tolist())) for row in c.eos]
            == [sorted(set(row)) for row in w]
        ),
    ),
    "seed": (
        setting(lambda n: 0 <= n < 2**32, whole=True, lists_of_one=False),
        lambda c, w: c.seeds[0].tolist() == w,
    ),
    "stop": (or_none(stop, []), lambda c, w: list(c.texts.stops) == w),
    "logprobs": (or_none(count(0, VOCAB)), lambda c, w: c.decoder.num_logprobs == w),
    "stream": (
        lambda v: bool(v) if type(v) in (bool, np.bool_) else REFUSED,
        lambda c, w: c.stream is w,
    ),
    "mesh": (only(None), lambda c, w: c.mesh is None),
}


@pytest.fixture(scope="module")
def given():
    """Good arguments, of two prompts."""
    target = specjax.load(folders.target())
    template = b"{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    target = dataclasses.replace(target, files={"chat_template.jinja": template})
    return {**DEFAULTS, "target": target, "prompts": [[1, 2, 3], [4]]}


def refusal(given, changes):
    """The call; or None where a ValueError names a changed argument, and nothing was compiled."""
    before = folders.compilations()
    try:
        return check(**{**given, **changes})
    except Exception as error:
        assert folders.compilations() == before
        assert type(error) is ValueError, f"{type(error).__name__} of {changes}: {error}"
        message = str(error)
        named = message.replace("prompt ", "prompts ")
        assert any(re.search(rf"\b{name}\b", named) for name in changes), f"{changes}: {message}"
        assert "\n" not in message and len(message) < 600, message
        return None


def changed(name, value):
    """Messages stand instead of prompts."""
    return (
        {name: value, "prompts": None}
        if name == "messages" and value is not None
        else {name: value}
    )


def test_every_argument_has_a_meaning_here():
    """A new argument has to be added to the table."""
    assert set(MEANINGS) == set(DEFAULTS)


@pytest.mark.parametrize("name", MEANINGS)
def test_a_value_is_used_as_it_says_or_refused_by_name(given, name):
    """All atoms, and 300 lists of them."""
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
    """Three arguments of one call: it stands where all three do, or else one of them is named."""
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
    """All of a proposer but hashable."""

    num_nodes, max_depth, is_chain, draws = 1, 0, True, False
    init = propose = observe = None
    __hash__ = None


# Arguments, and words of the message: the name, the value, and the cure.
CASES = [
    ({"prompts": 5}, ["prompts=5", "a list of texts"]),
    ({"prompts": b"x"}, ["prompts=b'x'", "a list of texts"]),
    ({"prompts": [[1.0]]}, ["prompt 0 holds 1.0", "whole numbers"]),
    ({"num_drafts": 2.5}, ["num_drafts=2.5", "a whole number, 0 (plain) or greater"]),
    ({"num_drafts": "x"}, ["num_drafts='x'", "a whole number"]),
    ({"num_drafts": True}, ["num_drafts=True", "a whole number"]),
    ({"num_drafts": -1, "proposer": specjax.NGram()}, ["num_drafts=-1", "0 (plain) or greater"]),
    ({"proposer": specjax.NGram}, ["proposer=<the class NGram>", "NGram(...)"]),
    ({"proposer": 5}, ["proposer=5", "no propose", "NGram()"]),
    ({"proposer": Lookalike()}, ["proposer", "not hashable", "frozen dataclass"]),
    ({"rule": "rejection"}, ["rule='rejection'", "specjax.Rejection()"]),
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
    ({"target": None}, ["target is a NoneType", "specjax.load"]),
    ({"draft_dtype": np.ones(2)}, ["draft_dtype", "int8"]),
    ({"adapter": [[]], "proposer": None}, ["adapter", "MedusaBank"]),
]


@pytest.mark.parametrize(("changes", "words"), CASES, ids=lambda case: str(case)[:40])
def test_the_message_names_argument_value_and_cure(given, changes, words):
    """Through `generate`, and before anything is compiled."""
    before = folders.compilations()
    with pytest.raises(ValueError) as caught:
        specjax.generate(**{**given, **changes})
    assert [word for word in words if word not in str(caught.value)] == [], caught.value
    assert folders.compilations() == before


def test_numbers_and_lists_of_every_library():
    """NumPy's and JAX's are Python's; booleans and texts are no numbers, and bytes no list of them."""
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
    """On one line, without a model's arrays, and however many digits it has."""
    assert shown(np.zeros((50, 50))).count("\n") == 0 and len(shown(list(range(10**6)))) < 100
    assert shown(10**5000) == "<a very long int>"
    assert shown(specjax.NGram(3)) == "<a NGram>" and shown(specjax.NGram) == "<the class NGram>"
