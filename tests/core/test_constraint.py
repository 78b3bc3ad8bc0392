"""Expressions, schemas and choices as automata over the tokens of real tokenizers, and what
`generate` writes under them."""

import dataclasses
import importlib.util
import json
import re

import counted
import jax
import jsonschema
import numpy as np
import pytest
import table_pair
import test_vocabulary as vocabularies
from command_line import PAIR, TINY, failure, run
from preparing import prepared

import specjax
from specjax import Automaton, Choice, JSONSchema, Regex
from specjax.constraints import automaton_of
from specjax.constraints import compile as compiling
from specjax.constraints.automaton import Automata, size_of
from specjax.constraints.lift import canonical, reachable
from specjax.text import sandbox, token_bytes

EXPRESSIONS = [
    r"[a-c]+x?", r"(the|that|then) (cat|rat|dog)s*", r"\d{1,3}(\.[\d]{1,3}){3}", r"é*|日本(語|人)?",
    r"[^t]*t", r"(ab|a)(bc|c)?", r"🙂+ ?",
    r"[0-9]+(\.[0-9]+)?", r"a|ab|a*?bé?c*", r"(t|th)*(he)?", r"é?", "a*",
]  # fmt: skip
LOG = {
    "type": "object",
    "properties": {
        "level": {"enum": ["INFO", "WARN", "ERROR"]},
        "at": {"type": "string", "format": "date-time"},
        "code": {"type": ["integer", "null"]},
        "seconds": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3},
        "host": {"$ref": "#/$defs/host"},
    },
    "required": ["level", "code", "host"],
    "additionalProperties": False,
    "$defs": {
        "host": {
            "type": "object",
            "properties": {"name": {"type": "string", "pattern": "^[a-z]{1,8}(-[0-9]+)?$"},
                           "up": {"type": "boolean"}},
            "required": ["name"],
        }
    },
}  # fmt: skip
SCHEMAS = [
    LOG,
    {"enum": ['a"b\\', "é\n", 1.5, None, True, {"x y": [1, "]"]}, []]},
    {"const": {"a": [1, {"b": "c.*"}]}},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
    {"type": "array", "items": {"anyOf": [{"type": "null"}, {"type": "integer"}]}, "minItems": 2},
    {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}},
    {"type": "object", "properties": {"ключ .*": {"allOf": [{"type": "boolean"}]},
                                      "z": {"const": 1}}, "required": ["z"]},
    {"type": "string", "pattern": "a|b|\\d{3}"},
    {"type": ["number", "boolean"]},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "enum": ["x", "y z"], "title": "T", "default": "x"},
    {"type": "string", "format": "uuid"},
    {"type": "array", "items": {"type": "string", "format": "date"}, "minItems": 1, "maxItems": 1},
    {"type": "object", "properties": {}},
]  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path))
    specjax.clear_programs()


@pytest.fixture(scope="module")
def target():
    return table_pair.target()


class Words:
    """What `automaton_of` needs of a model."""

    class Sized:
        vocab_size = 400

    def __init__(self, tokenizer):
        self.tokenizer, self.model, self.name = tokenizer, self.Sized(), "words"


def walks(automaton, written, count, seed=0, most=40):
    """Random complete texts of tokens: at random, and after `most` tokens by the shortest way."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        state, tokens = automaton.start, []
        while True:
            if automaton.accepting[state] and (len(tokens) >= most or rng.random() < 0.3):
                break
            after = automaton.next[state][automaton.classes]
            open_ = np.flatnonzero(after >= 0)
            if not open_.size:
                assert automaton.accepting[state]
                break
            if len(tokens) >= most:
                ends = automaton.shortest[after[open_]]
                open_ = open_[ends == ends.min()]
            # A class first, or long strings of any character would take all.
            kind = rng.choice(np.unique(automaton.classes[open_]))
            tokens.append(int(rng.choice(open_[automaton.classes[open_] == kind])))
            state = int(after[tokens[-1]])
        yield tokens, b"".join(written[token] for token in tokens)


def accepts(automaton, tokens):
    state = automaton.start
    for token in tokens:
        state = int(automaton.next[state, automaton.classes[token]])
        if state < 0:
            return False
    return bool(automaton.accepting[state])


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_texts_of_an_expression(expression, kind):
    """What an automaton of tokens writes matches in Python's `re`, and every way to write a
    matching text with tokens is allowed."""
    words = Words(vocabularies.TOKENIZERS[kind]())
    written = token_bytes(words.tokenizer, 400)
    automaton = automaton_of(words, Regex(expression))
    single = {}
    for token, text in enumerate(written):
        if text:
            single.setdefault(text, []).append(token)
    rng, texts = np.random.default_rng(1), set()
    for tokens, text in walks(automaton, written, 40):
        assert re.fullmatch(expression, text.decode()), text
        assert accepts(automaton, tokens)
        texts.add(text)
        again, at = [], 0  # another spelling of the same text
        while at < len(text):
            ends = [end for end in range(at + 1, len(text) + 1) if text[at:end] in single]
            end = int(rng.choice(ends))
            again.append(int(rng.choice(single[text[at:end]])))
            at = end
        assert accepts(automaton, again), (text, again)
        if text and not re.fullmatch(expression, text[:-1].decode(errors="replace")):
            assert not any(accepts(automaton, [t]) for t in single.get(text[:-1], []))
    assert len(texts) >= 2


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_texts_of_a_schema(schema, target):
    """They are JSON, and valid; each kind of them occurs."""
    written = token_bytes(target.tokenizer, target.model.vocab_size)
    for whitespace in ("[ ]?", "", r"[ \n]{0,2}"):
        automaton = automaton_of(target, JSONSchema(schema, whitespace))
        values = set()
        for _, text in walks(automaton, written, 25):
            value = json.loads(text.decode())
            jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker(["uuid"]))
            values.add(json.dumps(value))
        wanted = len(schema["enum"]) if "enum" in schema else 1 if "const" in schema else 2
        assert len(values) >= min(wanted, 3 if schema.get("properties") != {} else 1)


def test_the_first_token_may_be_the_one_that_must_follow():
    """Token 0, like any other, is then the only spelling."""
    classes, table = np.array([0, 0, 1]), np.array([[1, -1], [1, 2], [-1, -1]], np.int32)
    classes, table = canonical(classes, table, np.array([0, -1, -1], np.int32))
    ways = [{token: to for token, to in enumerate(row[classes]) if to >= 0} for row in table]
    assert ways == [{0: 1}, {0: 1, 1: 1, 2: 2}, {}]


def test_each_vocabulary_has_an_automaton_of_its_own():
    """Of equal size, too: the single tokens that match are those whose own bytes do."""
    for make in vocabularies.TOKENIZERS.values():
        words = Words(make())
        written = token_bytes(words.tokenizer, 400)
        automaton = automaton_of(words, Regex("[a-z]{1,9}"))
        for token, text in enumerate(written):
            wanted = text is not None and re.fullmatch(b"[a-z]{1,9}", text) is not None
            assert accepts(automaton, [token]) == wanted, text


def test_equal_texts_and_special_tokens():
    """Tokens with the same bytes are of one class, and special tokens are no text."""
    tokenizer = vocabularies.TOKENIZERS["sentencepiece"]()
    automaton = automaton_of(Words(tokenizer), Regex("a+ ?"))
    a, fallback = tokenizer.token_to_id("a"), tokenizer.token_to_id("<0x61>")
    assert automaton.classes[a] == automaton.classes[fallback]
    assert accepts(automaton, [a, fallback])
    end, space = tokenizer.token_to_id("</s>"), tokenizer.token_to_id("▁")
    assert accepts(automaton, [a, space])
    assert (automaton.next[:, automaton.classes[end]] < 0).all()
    odd = automaton_of(Words(tokenizer), Regex("(</s>)+"))  # as text, not as the token
    assert (odd.next[:, odd.classes[end]] < 0).all()


def test_forced_tokens_are_those_of_the_tokenizer(target):
    automaton = automaton_of(target, JSONSchema({"const": {"that": "the cat sat"}}, ""))
    state, tokens = automaton.start, []
    while automaton.likely[state] >= 0:
        tokens.append(int(automaton.likely[state]))
        state = int(automaton.next[state, automaton.classes[tokens[-1]]])
    assert target.tokenizer.decode(tokens) == '{"that":"the cat sat"}'
    assert tokens == target.tokenizer.encode('{"that":"the cat sat"}').ids


@pytest.mark.parametrize("constraint", [
    JSONSchema(LOG, "", canonical=True), Choice(["the cat sat", "the cats", "é"], canonical=True),
    Regex("(the )+(cat|rat)|that", canonical=True),
], ids=lambda one: type(one).__name__)  # fmt: skip
def test_canonical_texts(constraint, target):
    """What must follow has one spelling, and every text can still be written."""
    free = automaton_of(target, dataclasses.replace(constraint, canonical=False))
    one = automaton_of(target, constraint)
    for state in np.flatnonzero(one.likely >= 0):
        assert (one.next[state][one.classes] >= 0).sum() == 1
    assert (one.likely >= 0).any()
    written = token_bytes(target.tokenizer, target.model.vocab_size)
    texts = {text for _, text in walks(free, written, 30)}
    for tokens, _ in walks(one, written, 30):
        assert accepts(free, tokens)
    single = {}
    for token, text in enumerate(written):
        if text:
            single.setdefault(text, []).append(token)
    for text in texts:  # by any tokens, from left to right
        ways = {(0, one.start)}
        for at in range(len(text)):
            for begun, state in [way for way in ways if way[0] == at]:
                for end in range(begun + 1, len(text) + 1):
                    for token in single.get(text[begun:end], []):
                        after = int(one.next[state, one.classes[token]])
                        ways |= {(end, after)} if after >= 0 else set()
        assert any(at == len(text) and one.accepting[state] for at, state in ways), text


def test_shortest_and_longest():
    automaton = Automaton.of([{0: 1, 1: 2}, {2: 2}, {}, {3: 0}], [2], 5)
    assert automaton.shortest.tolist() == [1, 1, 0, 2]
    assert automaton.longest.tolist()[:3] == [2, 1, 0]
    loop = Automaton.of([{0: 0, 1: 1, 2: 2}, {}, {3: 2}], [1], 5)
    assert loop.longest[0] > 1000
    assert loop.next[0, loop.classes[2]] < 0  # no text can be completed from there
    assert loop.without([0]).longest[0] == 1


def test_what_no_text_reaches_is_left_out():
    """The states that remain are numbered anew, wherever a text begins."""
    whole = Automaton.of([{0: 3, 1: 3}, {0: 0}, {2: 1}, {}], [3], 4, start=1)
    some = reachable(whole)
    assert some.next.shape == (3, 3) and some.accepting.tolist() == [False, False, True]
    assert [accepts(some, text) for text in ([0, 0], [0, 1], [0], [2, 0], [1])] == [
        True, True, False, False, False,
    ]  # fmt: skip


def test_automata_are_kept(target, tmp_path, monkeypatch):
    """Another process reads the file, and a damaged file is made again."""
    constraint = JSONSchema(LOG)
    made = automaton_of(target, constraint)
    (file,) = (tmp_path / "constraints").glob("*.npz")
    specjax.clear_programs()
    compiled = []
    own = compiling._compile
    monkeypatch.setattr(
        compiling, "_compile", lambda *arguments: compiled.append(1) or own(*arguments)
    )
    read = automaton_of(target, constraint)
    assert not compiled
    for name in ("classes", "next", "accepting", "likely", "shortest"):
        np.testing.assert_array_equal(getattr(read, name), getattr(made, name))
    for content in (b"", file.read_bytes()[:200], b"PK\x03\x04" + bytes(100)):
        specjax.clear_programs()
        file.write_bytes(content)
        automaton_of(target, constraint)
    assert len(compiled) == 3
    specjax.clear_programs()
    automaton_of(target, JSONSchema(LOG, ""))
    assert len(compiled) == 4
    assert len([*(tmp_path / "constraints").glob("*.npz")]) == 2


def test_no_package(target, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -e .*\[constrain\]"):
        automaton_of(target, Regex("needs the package [0-9]"))
    assert automaton_of(target, Choice(["the cat", "a rat"])).shortest.max() > 0


REFUSED = {
    "nothing": (Regex(r"[^\x00-\x{10FFFF}]"), ["matches no text"]),
    "empty": (Regex("a{0}"), ["only the empty text"]),
    "exploding": (Regex("(a|b)*a(a|b){15}"), ["more than 32767 states", "bound"]),
    "long": (Regex(r"(\w{1,300}){1,300}"), ["smaller"]),
    "look-around": (Regex("(?=a)b"), ["cannot be compiled", "look-around"]),
    "damaged": (Regex("[a"), ["cannot be compiled"]),
    "space": (JSONSchema({"type": "null"}, "x?"), ["whitespace='x?'", "spaces, tabs"]),
    "another kind": (3, ["constraint=3", "specjax.Regex"]),
    "a text": ("[0-9]+", ["constraint='[0-9]+'", "specjax.Regex"]),
    "a dict": ({"type": "null"}, ["specjax.JSONSchema"]),
    "too many": ([Regex("a"), None], ["constraint has 2 values for 1 prompts"]),
    "other tokens": (Automaton.of([{0: 0}], [0], 7), ["7 tokens", "320"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_constraints_are_refused(case, target, monkeypatch):
    if case == "long":  # it takes all the time that a compilation may take
        monkeypatch.setitem(sandbox.SECONDS, "expressions", 1.0)
    constraint, words = REFUSED[case]
    before = counted.compilations()
    with pytest.raises(ValueError) as error:
        specjax.generate(target, "the cat", constraint=constraint)
    assert all(word in str(error.value) for word in words), error.value
    assert counted.compilations() == before


UNSUPPORTED = {
    "minimum": {"type": "integer", "minimum": 3},
    "multipleOf": {"type": "number", "multipleOf": 2},
    "uniqueItems": {"type": "array", "items": {"type": "null"}, "uniqueItems": True},
    "patternProperties": {"type": "object", "properties": {}, "patternProperties": {}},
    "oneOf": {"oneOf": [{"type": "null"}, {"type": "integer"}]},
    "not": {"type": "null", "not": {}},
    "if": {"type": "null", "if": {}},
    "recursive": {"$ref": "#/$defs/x", "$defs": {"x": {"type": "array", "items": {
        "$ref": "#/$defs/x"}}}},
    "leads to nothing": {"$ref": "#/$defs/x"},
    "$ref": {"$ref": "https://example.org/x"},
    "format": {"type": "string", "format": "email"},
    "together": {"type": "string", "pattern": "a", "maxLength": 3},
    "look-ahead": {"type": "string", "pattern": "(?=a)a"},
    "back-reference": {"type": "string", "pattern": "(a)\\1"},
    "no escape": {"type": "string", "pattern": "\\Aa"},
    "does not begin": {"type": "string", "pattern": "a^b"},
    "no text": {"type": "string", "pattern": "[]"},
    "no type": {"properties": {"a": {"type": "null"}}},
    "object without properties": {"type": "object"},
    "array without items": {"type": "array"},
    "required": {"type": "object", "properties": {}, "required": ["x"]},
    "another type": {"type": "string", "enum": ["a", 1]},
    "minItems": {"type": "array", "items": {"type": "null"}, "minItems": 4, "maxItems": 2},
    "'anyOf' beside '$ref'": {"$ref": "#/$defs/x", "anyOf": [], "$defs": {"x": {"type": "null"}}},
    "type 'text'": {"type": "text"},
    "allows anything": {"type": "array", "items": True},
    "enum []": {"enum": []},
    "enum 'ab'": {"enum": "ab"},
    "anyOf []": {"anyOf": []},
    "anyOf {'type': 'null'}": {"anyOf": {"type": "null"}},
    "allOf [{'type': 'null'}, ": {"allOf": [{"type": "null"}, {"type": "null"}]},
    "too large": {
        "$ref": "#/$defs/0",
        "$defs": {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(20)}
        | {"20": {"type": "null"}},
    },
}  # fmt: skip


@pytest.mark.parametrize("word", UNSUPPORTED)
def test_what_a_schema_cannot_keep_is_named(word, target):
    deep = {"type": "object", "properties": {"here": UNSUPPORTED[word]}, "required": ["here"],
            "$defs": UNSUPPORTED[word].get("$defs", {})}  # fmt: skip
    with pytest.raises(ValueError) as error:
        automaton_of(target, JSONSchema(deep))
    assert word in str(error.value) and "#/properties/here" in str(error.value), error.value


@pytest.mark.parametrize("schema", ["{", "[1]", 3, {"a": float("nan")}, {"a": {1}}])
def test_what_is_no_schema(schema):
    with pytest.raises(ValueError, match="no schema"):
        JSONSchema(schema)


@pytest.mark.parametrize("texts", [[], "yes", ["a", ""], [1], ["\ud800"]])
def test_what_is_no_choice(texts):
    with pytest.raises(ValueError, match="Choice"):
        Choice(texts)


@pytest.mark.parametrize(
    ("kind", "given"), [(Regex, "a"), (JSONSchema, {"type": "null"}), (Choice, ["a"])]
)
def test_canonical_is_true_or_false(kind, given):
    with pytest.raises(ValueError, match=r"canonical='no' .*True or False"):
        kind(given, canonical="no")


@pytest.mark.parametrize(
    ("ways", "accepting", "words"),
    [
        ([{0: 1}, {}], [], "no text"),
        ([{9: 0}], [0], "token of transitions"),
        ([{0: 4}], [0], "state of transitions"),
        ([], [0], "transitions"),
        ([{0: 0}], [3], "accepting"),
    ],
)
def test_what_is_no_automaton(ways, accepting, words):
    with pytest.raises(ValueError, match=words):
        Automaton.of(ways, accepting, 5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"classes": [[0], [1]]}, r"pass \[tokens\], \[states, classes\] and \[states\]"),
        ({"next": [1, 1]}, r"pass \[tokens\], \[states, classes\] and \[states\]"),
        ({"accepting": [True]}, r"pass \[tokens\], \[states, classes\] and \[states\]"),
        ({"start": 2}, r"start=2.* in \[0, 1\]"),
        ({"start": -1}, r"start=-1.* in \[0, 1\]"),
        ({"classes": [0, 2]}, r"classes .* outside \[0, 1\]"),
        ({"classes": [-1, 1]}, r"classes .* outside \[0, 1\]"),
        ({"next": [[1, 0], [2, 1]]}, r"next .* outside \[-1, 1\]"),
        ({"next": [[1, 0], [-2, 1]]}, r"next .* outside \[-1, 1\]"),
    ],
)
def test_arrays_that_are_no_automaton(change, words):
    given = {"classes": [0, 1], "next": [[1, 0], [-1, 1]], "accepting": [False, True], "start": 1}
    assert Automaton(**given).next.shape == (2, 2)
    with pytest.raises(ValueError, match=words):
        Automaton(**{**given, **change})


def may_follow(automaton, ends, text, length, limit, least):
    """The tokens that may follow the drafts `text` below a root of this length, by definition."""
    state = None if automaton is None else automaton.start  # None allows everything
    for token in text:
        after = -1 if state is None else int(automaton.next[state, automaton.classes[token]])
        state = None if token in ends or after < 0 else after  # nothing is emitted any more
    here, ways = length + len(text), {}  # token: the fewest and the most tokens of the text
    for token in range(6):
        after = -1 if state is None else int(automaton.next[state, automaton.classes[token]])
        if token in ends and (state is None or automaton.accepting[state]):
            ways[token] = here + 1, here
        elif token not in ends and state is None:
            ways[token] = here + 1, np.inf
        elif token not in ends and after >= 0:
            ways[token] = here + 1 + automaton.shortest[after], here + 1 + automaton.longest[after]
    fitting = {token for token in ways if ways[token][0] <= limit} or set(ways)
    return {token for token in fitting if ways[token][1] >= least} or fitting or set(range(6))


def test_what_may_follow_by_definition():
    """At the nodes of a wide tree, near a limit and before the fewest tokens."""
    loop = Automaton.of([{0: 1, 1: 2}, {2: 0, 3: 2}, {3: 3}, {}], [2, 3], 6)
    line = Automaton.of([{4: 1, 5: 1}, {0: 2, 1: 3, 4: 2}, {2: 3}, {}], [1, 3], 6)
    rows, ends = (loop, line, None, loop), [{5}, {3}, {5}, {5, 2}]
    rows = [one and one.without(those) for one, those in zip(rows, ends, strict=True)]
    eos = np.array([[5, -1], [3, -1], [5, -1], [5, 2]], np.int32)
    automata = Automata.of_rows(rows, 6).begin(eos)
    rng, allow = np.random.default_rng(0), jax.jit(type(automata).allow)
    for _ in range(12):
        path = rng.integers(0, 6, (4, 33, 2), np.int32)
        depth = rng.integers(0, 3, (4, 33))
        path[np.arange(2) >= depth[..., None]] = -1
        length, least = rng.integers(1, 5, 4), rng.integers(0, 9, 4)
        limit = length + rng.integers(1, 6, 4)
        numbers = (x.astype(np.int32) for x in (length, limit, least))
        kept = np.isfinite(allow(automata, np.zeros((4, 33, 6), np.float32), path, *numbers))
        for row, node in np.ndindex(4, 33):
            text = path[row, node, : depth[row, node]].tolist()
            wanted = may_follow(rows[row], ends[row], text, length[row], limit[row], least[row])
            assert set(np.flatnonzero(kept[row, node])) == wanted, (row, text)


def test_drafts_that_must_follow_by_definition():
    """Up to the first state with several ways, or to the EOS where a text has to end."""
    one = Automaton.of([{0: 1}, {2: 2}, {1: 3, 4: 3}, {0: 4}, {}], [4], 6)
    rows, eos = (one, one, None, one), np.array([[5, -1], [5, 3], [5, -1], [3, -1]], np.int32)
    automata = Automata.of_rows(rows, 6).begin(eos)
    begun = dataclasses.replace(automata, state=np.array([1, 4, 0, 3], np.int32))
    tokens, count = jax.jit(type(begun).drafts, static_argnums=1)(begun, 4, eos)
    assert count.tolist() == [2, 2, 0, 0]
    assert [row[:n].tolist() for row, n in zip(tokens, count, strict=True)] == [
        [0, 2],
        [0, 5],
        [],
        [],
    ]


@pytest.mark.parametrize(("states", "size"), [(255, 256), (256, 1024), (1023, 1024), (1024, 4096)])
def test_sizes_of_automata(states, size):
    """A state and a class more than the automaton has, and then as few sizes as possible."""
    table = np.full((states, 127), -1, np.int32)
    table[:-1, 0] = np.arange(1, states)
    automaton = Automaton(np.zeros(6, np.int32), table, np.arange(states) == states - 1)
    assert size_of([None, automaton]) == (size, 128)
    assert size_of([None]) == (256, 128)


def test_rows_take_automata_of_the_target_alone():
    """And the message says which row has another one."""
    rows = [None, Automaton.of([{0: 0}], [0], 7)]
    with pytest.raises(ValueError, match=r"row 1 is for 7 tokens, and the target has 8: compile"):
        Automata.of_rows(rows, 8)
    assert Automata.of_rows(rows, 7).classes.shape == (2, 7)


def test_a_vocabulary_that_cannot_write_a_character():
    words = Words(vocabularies.TOKENIZERS["unigram"]())
    with pytest.raises(ValueError, match=r"cannot write any text of .*no token writes b'#"):
        automaton_of(words, Regex("a#b"))
    # Another way is left.
    assert automaton_of(words, Regex("a(#|t)")).shortest.max() >= 1


def test_numbers_that_do_not_fit(target):
    def refused(words, **options):
        before = counted.compilations()
        with pytest.raises(ValueError, match=words):
            specjax.generate(target, "the cat", **options)
        assert counted.compilations() == before

    choice = Choice(["the cat sat on the mat", "the cat sat on the hat"])
    least = automaton_of(target, choice).shortest[0]
    refused(f"max_new_tokens={least - 1} is too small.* {least} tokens",
            constraint=choice, max_new_tokens=int(least) - 1)  # fmt: skip
    refused("min_new_tokens=100 is more than", constraint=choice, min_new_tokens=100)
    refused("needs a token that ends", constraint=choice, eos=[])
    wordless = dataclasses.replace(target, tokenizer=None)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        specjax.generate(wordless, [[1, 2]], constraint=choice)


CONSTRAINTS = [
    Regex("(the|a) [a-z]{3,5}( sat| ran)?"), None, JSONSchema(SCHEMAS[4], ""),
    Choice(["cat", "rat"]),
]  # fmt: skip
PROMPTS = ["the cat sat", "and the dog", "then the rat", "the"]


def valid(constraint, text):
    if constraint is None:
        return True
    if isinstance(constraint, Regex):
        return re.fullmatch(constraint.expression, text) is not None
    if isinstance(constraint, Choice):
        return text in constraint.texts
    jsonschema.validate(json.loads(text), json.loads(constraint.schema))
    return True


def test_generate(target):
    """One constraint a prompt, greedily and at temperature 1: valid texts, equal where forced
    tokens are drafted, streamed or not.  `test_constraint_laws.py` has the other proposers."""
    prompts = 2 * PROMPTS
    options = {"constraint": 2 * CONSTRAINTS, "max_new_tokens": 24, "logprobs": 1, "seed": 3,
               "temperature": [0.0] * 4 + [1.0] * 4}  # fmt: skip
    plain = specjax.generate(target, prompts, proposer="none", **options)
    assert all(map(valid, 2 * CONSTRAINTS, plain.text)), plain.text
    assert plain.text[:4] != plain.text[4:]
    assert all(np.isfinite(row.warped).all() for row in plain.logprobs)
    options |= {"proposer": "forced", "num_drafts": 2}
    forced = specjax.generate(target, prompts, **options)
    assert forced.text == plain.text
    stream = specjax.generate(target, prompts, stream=True, **options)
    pieces = np.array(list(stream))
    assert ["".join(column) for column in pieces.T] == plain.text


def test_a_stop_string_cuts_a_text(target):
    constraint = Regex("(cat|rat|hat)(, (cat|rat|hat)){5,9}")
    options = {"constraint": constraint, "max_new_tokens": 60, "temperature": 1.0,
               "proposer": "none"}  # fmt: skip
    whole = specjax.generate(target, "the", **options)
    assert valid(constraint, whole.text[0])
    cut = specjax.generate(target, "the", stop=", ", **options)
    assert cut.finish == ["stop"] and cut.text[0] in ("cat", "rat", "hat")
    assert whole.text[0].startswith(cut.text[0] + ", ")


def test_a_text_is_complete_at_the_limit(target):
    """Near the limit only the tokens are left that complete the text."""
    constraint = JSONSchema({"type": "array", "items": {"type": "string"}, "minItems": 1}, "")
    for new in (5, 9, 17):
        output = specjax.generate(
            target,
            PROMPTS,
            constraint=constraint,
            max_new_tokens=new,
            temperature=1.0,
            proposer="none",
        )
        assert all(valid(constraint, text) for text in output.text)
        assert all(len(tokens) <= new for tokens in output.tokens)


def test_the_fewest_new_tokens(target):
    """They are reached where the constraint has such texts; the prompt stays as short as it is."""
    constraint = Regex("(cat ?|rat ?){1,20}")
    options = {"constraint": constraint, "max_new_tokens": 40, "temperature": 1.0}
    call = prepared(target, "the", min_new_tokens=12, **options)
    assert call.prompt.shape == (1, 16)
    for how in ({"proposer": "none"}, {"proposer": "forced", "num_drafts": 2}):
        output = specjax.generate(target, "the", min_new_tokens=12, **how, **options)
        assert len(output.tokens[0]) >= 12 and valid(constraint, output.text[0])


def test_bans_do_not_break_a_constraint(target):
    """Where other settings ban all that may follow, the constraint holds."""
    tokens = target.tokenizer.encode("cat").ids
    output = specjax.generate(
        target, "the", constraint=Choice(["cat", "cats"]), max_new_tokens=8, proposer="none",
        logit_bias={t: -float("inf") for t in {*tokens, *target.tokenizer.encode("c").ids}},
    )  # fmt: skip
    assert output.text[0] in ("cat", "cats")


def test_the_command_line(capsys, tmp_path, monkeypatch):
    table_pair.stand_in(monkeypatch, TINY)
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"type": "object", "properties": {"a": {"type": "boolean"}}}))
    short = ["--json", "--no-compare", "--max-new-tokens", "40"]
    none = ["--proposer", "none"]
    for options, holds in (
        (
            ["--regex", "[0-9]{2}-[a-f]+", "--proposer", "forced", "--num-drafts", "2"],
            r"[0-9]{2}-[a-f]+",
        ),
        (["--choice", "yes", "--choice", "no", "--canonical", *none], "yes|no"),
        (["--json-schema", file, "--json-whitespace", "", *none], r'\{("a":(true|false))?\}'),
    ):
        said = run(capsys, "generate", "def f(", "--target", PAIR[1], *options, *short)
        assert re.fullmatch(holds, json.loads(said.out)["text"][0]), said.out
    file.write_text('{"type": "integer", "minimum": 3}')
    command = ["generate", "def f(", "--target", PAIR[1]]
    assert "'minimum'" in failure(capsys, *command, "--json-schema", file)
    assert "--json-schema" in failure(capsys, *command, "--json-whitespace", "")
    assert "--canonical" in failure(capsys, *command, "--canonical")
    assert "not allowed with" in failure(capsys, *command, "--regex", "a", "--choice", "b")
    file.write_text("no schema")
    assert str(file) in failure(capsys, *command, "--json-schema", file)


def test_every_text_of_a_finite_expression():
    """Texts that are a beginning of others, lazy repetitions and alternatives in any order."""
    words = Words(vocabularies.TOKENIZERS["byte-level"]())
    known = [token.encode() for token in ("a", "b", "é", "x")]
    single = {text: n for n, text in enumerate(token_bytes(words.tokenizer, 400)) if text}
    every = [""]
    for _ in range(4):
        every += [text + letter for text in every for letter in "abéx" if len(text) < 4]
    assert len(known) == 4
    for expression in (
        "a|ab|abé", "ab?é?", "(a|ab)(é|bé)?x*?", "(?:a*|b)x?", "a*?|b|é+", "((a|b)*?x)?", "é?(ab)*",
    ):  # fmt: skip
        automaton = automaton_of(words, Regex(expression))
        for text in set(every):
            spelt = [single[bytes([byte])] for byte in text.encode()]
            wanted = re.fullmatch(expression, text) is not None
            assert accepts(automaton, spelt) == wanted, (expression, text)
