"""The texts of JSON schemas as automata over bytes: values, strings, patterns, references."""

import datetime
import itertools
import json
import re

import pytest
from automata_of_bytes import accepts, every

from specjax import JSONSchema, Regex
from specjax.constraints.byte_automaton import absent_from


def compiled(schema, whitespace=""):
    return JSONSchema(schema, whitespace).compile()


VALUES = [
    {'a"b': 1}, {"a.b": 1}, {"$": 1}, {"^(x|y)*": {"[0-9]": ["\\d", {}]}}, {"": []}, {"é\n": "ü\t"},
    18446744073709551617, -(10**40), 1.5, 1e22, -0.0, "a\"b\\/\x00\x7f", "\ud800", {"\ud800": 0},
    "{1,3}", "日本", None, True, [], {}, [[], {}], {"b": 1, "a": 2}, "(?i)",
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: json.dumps(value)[:30])
def test_a_value_has_exactly_its_json(value):
    halved = "\\ud800" in json.dumps(value)  # half of a pair, which UTF-8 cannot write
    text = json.dumps(value, ensure_ascii=halved, separators=(",", ":"))
    assert every(compiled({"const": value})) == {text}
    assert every(compiled({"enum": [value, "other"]})) == {text, '"other"'}
    name = next(iter(value)) if isinstance(value, dict) and value else "name"
    keyed = {"type": "object", "properties": {name: {"const": value}}, "required": [name]}
    (written,) = every(compiled(keyed))
    assert json.loads(written) == {name: value}


def test_members_that_may_lack():
    """For every choice of required ones, the texts are those of the subsets that have them."""
    names = ["a", 'b"', "c.", "d"]
    for required in itertools.chain.from_iterable(
        itertools.combinations(names, count) for count in range(5)
    ):
        properties = {name: {"const": n} for n, name in enumerate(names)}
        schema = {"type": "object", "properties": properties, "required": list(required)}
        wanted = {
            json.dumps({name: names.index(name) for name in chosen}, separators=(",", ":"))
            for count in range(5)
            for chosen in itertools.combinations(names, count)
            if set(required) <= set(chosen)
        }
        assert every(compiled(schema)) == wanted


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"type": "array", "items": False}, {"[]"}),
        ({"type": "array", "items": False, "minItems": 1}, set()),
        ({"type": "array", "items": {"const": 1}, "maxItems": 2}, {"[]", "[1]", "[1,1]"}),
        ({"type": "array", "items": {"const": 1}, "minItems": 1.0, "maxItems": 1.0}, {"[1]"}),
        ({"type": "array", "items": {"const": 1}, "maxItems": 0}, {"[]"}),
        ({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "minItems": 1}, {"[1,2]"}),
        ({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "minItems": 2,
          "maxItems": 2}, {"[1,2]"}),
        ({"type": "array", "items": [{"const": 1}], "additionalItems": False}, {"[1]"}),
        ({"type": "object", "properties": {"a": False, "b": {"const": 1}}}, {"{}", '{"b":1}'}),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, set()),
        ({"anyOf": [False, {"const": 1}]}, {"1"}),
        ({"allOf": [False]}, set()),
        ({"const": 1, "x-order": 3, "markdownDescription": "one", "nullable": True}, {"1"}),
        ({"type": "null", "minimum": 3, "format": "int32", "minItems": 1}, {"null"}),
        ({"type": "string", "maxLength": 0}, {'""'}),
    ],
)  # fmt: skip
def test_the_texts_of_a_small_schema(schema, texts):
    assert every(compiled(schema)) == texts


def test_a_schema_has_so_many_parts():
    """The last of them is read, and one more is refused."""
    assert every(compiled({"anyOf": [False] * 4095})) == set()
    with pytest.raises(ValueError, match="the schema is too large"):
        compiled({"anyOf": [False] * 4096})


@pytest.mark.parametrize("count", [1, 3])
def test_counts_beside_items_that_are_written_out(count):
    two = {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}]}
    with pytest.raises(ValueError, match="minItems or maxItems beside prefixItems"):
        compiled({**two, "minItems" if count > 2 else "maxItems": count})


SCALARS = {
    "number": ("0 -0 1e5 1E5 1e+5 1e-05 -1.5e3 0.10 12", "01 +1 1. .5 1e 1e+ - 1.e5 --1 0x1"),
    "integer": ("0 -7 10", "1.0 1e5 01"),
    "string": (r'"" "\u00e9" "\u00E9" "é" "\n\/\b\f\r\t\"\\" "\u0000" "😀" "'"\x7f\x80"'" "\ud7ff"',
               r'"\ud83d" "\udc00" "\x41" "\u00e" "\" " "a"b" "'"\x01" "\n\""),
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALARS)
def test_scalars(kind):
    """All of JSON's ways to write a number, and a character."""
    automaton = compiled({"type": kind})
    allowed, forbidden = SCALARS[kind]
    for text in allowed.split(" "):
        assert accepts(automaton, text), text
        json.loads(text)
    for text in re.split("(?<!\\\\) ", forbidden):
        assert not accepts(automaton, text), text


@pytest.mark.parametrize("most", [20, 200, 1000])
def test_a_length_costs_states_in_proportion(most):
    """At the root, too, where a string's quote may also stand inside of the text, as an escape."""
    automaton = compiled({"type": "string", "minLength": most - 1, "maxLength": most})
    assert len(automaton.next) <= 15 * most + 10
    for one in ("a", "é", "😀", "\\n", "\\u00e9", '\\"'):
        for count in (most - 2, most - 1, most, most + 1):
            assert accepts(automaton, f'"{one * count}"') == (count in (most - 1, most))


@pytest.mark.parametrize(
    "expression", ['"([a-z]|\\\\"){0,40}"', "a[ab]{0,40}c", r"[\w.]{0,40}x", "(x|xy){40}z"]
)
def test_an_expression_is_matched_from_its_beginning_only(expression):
    """Its states do not depend on where else in a text a match could begin."""
    automaton = Regex(expression).compile()
    assert len(automaton.next) <= 41 * 310
    assert automaton.example() is not None


@pytest.mark.parametrize(
    ("expression", "absent"),
    [
        ("a[b.]c", True), ("[[a].]", True), (r"\.\d\w\[", True), ("]a", True), ("a.b", False),
        ("[a].", False), ("].", False), ("[^a]", False), ("[[:alpha:]]", False), (r"\D", False),
        (r"\x00", False), ("[\0]", False),
    ],
)  # fmt: skip
def test_an_expression_that_shows_that_a_character_is_absent(expression, absent):
    assert absent_from(expression) == ("\0" if absent else "")


PROBES = [
    *map(chr, range(0x20, 0x7F)),
    *"éßK٣中😀\U00010000\u0085\u00a0\u1680\u2028\u3000\ufeff\n\r\t\b\f",
]
WORD = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")
SPACE = set(" \t\n\r\f\u00a0\u1680\u2028\u3000\ufeff")
CLASSES = {
    r"\w": WORD, r"\W": set(PROBES) - WORD, r"\d": set("0123456789"), r"\s": SPACE,
    r"\D": set(PROBES) - set("0123456789"), r"\S": set(PROBES) - SPACE,
    ".": set(PROBES) - set("\n\r\u2028"), "[^]": set(PROBES), r"[^\w]": set(PROBES) - WORD,
    "[^a]": set(PROBES) - {"a"}, r'[^"]': set(PROBES) - {'"'}, r"[^\\a-y\S]": SPACE,
    r"[\b\t\n]": set("\b\t\n"),
    r"[\w-]": WORD | {"-"}, r"[\d-z]": set("0123456789-z"), r"[^\d\D]?": set(), r"[]-a]": set(),
    r"[\]\-a]": set("]-a"), r"[!-~]": set(map(chr, range(0x21, 0x7F))), r"\x41": {"A"},
    "[aé]": {"a", "é"}, r"[\0-\x00A]": {"A"},
    r"\u00e9": {"é"}, r"\ud83d\ude00": {"😀"}, r"\ud800\udc00": {"\U00010000"},
    r"\u{1F600}": {"😀"}, r"[\u{4e00}-\u9fff]": {"中"},
    r"\cJ": {"\n"}, r"\/": {"/"}, r"\.": {"."}, r"\p{Lu}": None, r"[^\p{L}]": None,
}  # fmt: skip
"""Patterns of one character, and which of the probes they match in ECMA-262; None is left to
Unicode's tables."""


@pytest.mark.parametrize("pattern", CLASSES)
def test_the_characters_of_a_pattern(pattern):
    wanted = CLASSES[pattern]
    if pattern == "[]-a]":  # a class without characters, and a text
        with pytest.raises(ValueError, match="matches no text"):
            compiled({"type": "string", "pattern": pattern})
        return
    automaton = compiled({"type": "string", "pattern": f"^{pattern}$"})
    allowed = {one for one in PROBES if accepts(automaton, json.dumps(one, ensure_ascii=False))}
    if wanted is None:
        assert ({"a", "A", "é", "中"} & allowed) == ({"A"} if "Lu" in pattern else set())
    else:
        assert allowed == wanted


PATTERNS = {
    "^a|b$": ("a b", "ab"), "(^a$)|(^bc$)": ("a bc", "abc"), "^(?:a|^b)c?$": ("a b bc", "c"),
    "(?<year>[0-9]{2})+": ("12 1234", "123"), "(?P<x>a)": ("a", "b"),
    "a{,2}b": ("b ab aab", "aaab"),
    "x{": ("x{", "x"), "a*?b??": ("aa ab b", "ba"), "(?i)ab": ("ab AB aB", "abc"),
    "(?i:a)b": ("ab Ab", "AB"), r"^[^@\s]+@[^@\s]+\.\w{2,}$": ("a@b.cc é@x.y.zz", "a@b a@@b.cc"),
    "^.+$": ("a {} é", ""), "": ("", "a"), "^$": ("", "a"), "[[:a]+]": ("a] :[]", "a"),
    'a"b': ('a"b', 'ab a\\"b'), r"a\\\n": ("a\\\n", "a a\\n"),
}  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_strings_of_a_pattern(pattern):
    automaton = compiled({"type": "string", "pattern": pattern})
    allowed, forbidden = (texts.split(" ") for texts in PATTERNS[pattern])
    assert all(accepts(automaton, json.dumps(one, ensure_ascii=False)) for one in allowed)
    assert not any(accepts(automaton, json.dumps(one, ensure_ascii=False)) for one in forbidden)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(?!a)b", "look-ahead"), ("(?<=a)b", "look-behind"), (r"(a)\1", "back-reference"),
        (r"(?<n>a)\k<n>", "back-reference"), (r"\ba", r"has \\b, which no"),
        (r"\B", r"has \\B, which no"), (r"\01a", "back-reference"), (r"\Aa", r"\\A, which is no"),
        ("a^b", "does not begin"), ("a$b", "does not end"), ("(^a)+", "does not begin"),
        ("a(^b)", "does not begin"), ("(a$)b", "does not end"), (r"\udc00\udc00", "no text"),
        (r"\ud800\ue000", "no text"),
        ("^*", r"repeats '\^'"), ("a**", "nothing before it"), ("+", "nothing before it"),
        ("(a", r"'\(' without"), ("a)", r"'\)' without"), ("[a", r"'\[' without"),
        ("[a-", r"'\[' without"), ("[z-a]", "from 'z' down to 'a'"), ("\\", "escape"),
        ("(?#a)", r"group '\(\?#a"), (r"\u12", r"has \\u without"), (r"\xg", r"has \\x without"),
        (r"\u{110000}", "no character"), ("(" * 100 + ")" * 100, "64 groups"),
        (r"\p{Nope}", "cannot be compiled"), ("[]", "no text"), ("\x01", "no text"),
    ],
)  # fmt: skip
def test_what_a_pattern_cannot_have(pattern, words):
    schema = {"type": "object", "properties": {"p": {"type": "string", "pattern": pattern}}}
    with pytest.raises(ValueError, match=words) as error:
        compiled(schema)
    assert "#/properties/p" in str(error.value)


def test_dates_are_days_of_the_calendar():
    automaton = compiled({"type": "string", "format": "date"})
    stamps = compiled({"type": "string", "format": "date-time"})
    for year in (0, 1, 4, 99, 100, 400, 1000, 1900, 2000, 2023, 2024, 2100, 9999):
        for month, day in itertools.product(range(14), range(33)):
            text = f"{year:04}-{month:02}-{day:02}"
            try:
                datetime.date(year, month, day)
                exists = True
            except ValueError:
                exists = False
            assert accepts(automaton, f'"{text}"') == exists, text
            assert accepts(stamps, f'"{text}T23:59:59.5+23:59"') == exists, text


BOX = {"type": "string", "maxLength": 1}
REFERENCES = [
    ("#/properties/a/anyOf/0", {"properties": {"a": {"anyOf": [BOX]}}}),
    ("#/definitions/Box%3Cstring%3E", {"definitions": {"Box<string>": BOX}}),
    ("#/$defs/a~1b~0c%25%22", {"$defs": {'a/b~c%"': BOX}}),
    ("#/$defs//%20", {"$defs": {"": {" ": BOX}}}),
    ("#box", {"$defs": {"x": {"$anchor": "box", **BOX}}}),
    ("#box", {"$defs": {"x": {"$dynamicAnchor": "box", **BOX}}}),
    ("#box", {"$defs": {"x": {"$id": "#box", **BOX}}}),
    ("box.json", {"$id": "https://a.b/c.json", "$defs": {"x": {"$id": "/box.json", **BOX}}}),
    ("https://a.b/c.json#/$defs/x", {"$id": "https://a.b/c.json", "$defs": {"x": BOX}}),
    ("urn:x:box#y", {"$defs": {"x": {"$id": "urn:x:box", "items": {"$anchor": "y", **BOX}}}}),
    ("#/$defs/x", {"$defs": {"x": {"$id": "x", "$ref": "#/$defs/x", "$defs": {"x": BOX}}}}),
    ("#/x-own/1", {"x-own": [{}, BOX]}),
    ("#/$defs/x", {"$schema": "http://json-schema.org/draft-07/schema#",
                   "$defs": {"x": {"$ref": "#/$defs/y", "minimum": 3, "type": "null"}, "y": BOX}}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "document"), REFERENCES)
def test_where_a_reference_leads(name, document):
    root = {"type": "object", "required": ["r"], **document}
    root["properties"] = {"r": {"$ref": name}, **document.get("properties", {})}
    automaton = compiled(root)
    assert accepts(automaton, '{"r":"x"}')
    assert not accepts(automaton, '{"r":"xy"}') and not accepts(automaton, '{"r":1}')


@pytest.mark.parametrize(
    ("name", "document"),
    [
        ("#/$defs/0", {}), ("#x", {"$defs": {"a": {"const": {"$anchor": "x"}}}}),
        ("#/$defs/01", {"$defs": [BOX, BOX]}), ("#/$defs/2", {"$defs": [BOX]}),
        ("#/$defs/x/y", {"$defs": {"x": 3}}), ("other.json", {}), ("http://[", {}), (3, {}),
    ],
)  # fmt: skip
def test_a_reference_that_leads_to_no_schema(name, document):
    root = {"type": "object", "properties": {"r": {"$ref": name}}}
    with pytest.raises(ValueError, match=r"#/properties/r"):
        compiled(root | document)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"}, {"$ref": "#a", "$anchor": "a"}, {"$id": "http://a/b", "$ref": "b#"},
        {"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [{"const": 1}, {"$ref": "#/%24defs/x"}]}}},
    ],
)  # fmt: skip
def test_a_schema_inside_of_itself(schema):
    with pytest.raises(ValueError, match="recursive"):
        compiled(schema)
