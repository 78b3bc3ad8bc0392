"""Compiles JSON schemas that are regular, by the expressions of their texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import NoReturn

from specjax._internal.checks import reworded, shown, whole
from specjax.constraints import byte_automaton, json_texts, patterns
from specjax.constraints.byte_automaton import Bytes
from specjax.constraints.references import References, is_old
from specjax.types import Json

_KEYWORDS = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": set(),
    "number": set(),
    "boolean": set(),
    "null": set(),
    "array": {"items", "prefixItems", "minItems", "maxItems", "additionalItems"},
    "object": {"properties", "required", "additionalProperties"},
}
"""The keywords of each type that are supported."""

_HEADS = ("$ref", "anyOf", "allOf", "enum", "const", "type")
"""The keywords of which a schema has one."""

_NUMERIC = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_LOST = {
    "integer": _NUMERIC,
    "number": _NUMERIC,
    "array": {"contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems"},
    "object": {
        "dependencies", "dependentRequired", "dependentSchemas", "maxProperties", "minProperties",
        "patternProperties", "propertyNames", "unevaluatedProperties",
    },
}  # fmt: skip
"""The keywords of each type that JSON Schema knows, in any of its drafts, and no automaton
supports.  A keyword does not constrain values of another type.
"""

_LOST_HEADS = {
    "$dynamicRef", "$recursiveRef", "disallow", "else", "extends", "if", "not", "oneOf", "then",
}  # fmt: skip
"""The unsupported keywords of every type.  All other names do not constrain a value."""

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_BY_FOUR = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP = f"(?:[0-9]{{2}}{_BY_FOUR}|(?:{_BY_FOUR})00)"
_DAY = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP}-02-29)"
)
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_CLOCK = f"{_HOUR}:[0-5][0-9](?:\\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR})"
_HEX = "[0-9a-fA-F]"
_FORMATS = {
    "date": _DAY,
    "time": _CLOCK,
    "date-time": f"{_DAY}T{_CLOCK}",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
}
"""Formats of RFC 3339 and RFC 4122 as expressions.  Years begin at 0001, T and Z are capitals, a
second has at most nine decimals, and there are no leap seconds."""

_REPEATED = 1000  # the most items or characters that are counted
_DEPTH, _PARTS = 64, 4096  # of a schema with its references put in
_LONGEST = 2**22  # characters of an expression


def canonical(schema: object, called: str = "JSONSchema") -> str:
    """Returns a schema as JSON with its keys in order, or raises ValueError if it is invalid."""
    before = f"{called}({shown(schema)}) is no schema ("
    cure = '); pass a dict such as {"type": "object", "properties": {...}}, or its JSON'
    with reworded(before, cure, (TypeError, ValueError, RecursionError)):
        fields = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(fields, Mapping):
            raise TypeError(f"it is a {type(fields).__name__}")
        return json.dumps(fields, allow_nan=False)


def compile_schema(schema: str, whitespace: str, before: str = "", after: str = "") -> Bytes:
    """Compiles the automaton of a schema's JSON between two texts.

    Raises:
      ValueError: a keyword that is not supported, with its name and position; or as
        `byte_automaton.of_expression`.
    """
    space = byte_automaton.of_expression(f"whitespace={shown(whitespace)}", whitespace)
    if not set(space.used) <= set(b" \t\n\r") or space.example() is None:
        raise ValueError(
            f"whitespace={shown(whitespace)} can write other characters; JSON allows spaces, tabs "
            "and line ends between its tokens"
        )
    reader = _Reader(json.loads(schema), f"(?:{whitespace})")
    expression = reader.of(reader.root, "#", ())
    if expression is None:
        return byte_automaton.of_texts(())
    whole = f"{json_texts.literal(before)}(?:{expression}){json_texts.literal(after)}"
    return byte_automaton.of_expression("JSONSchema", whole, absent="\0")


class _Reader:
    """Reads schemas as expressions.  None is the expression of a schema without values."""

    def __init__(self, root: Mapping[str, Json], space: str) -> None:
        self.root, self.space, self.parts = root, space, 0
        self.references, self.old = References(root), is_old(root)

    def of(self, schema: Json, at: str, open_: tuple[int, ...]) -> str | None:
        """Returns the expression of a schema at a path, inside of references `open_`."""
        self.parts += 1
        if self.parts > _PARTS or at.count("/") > _DEPTH:
            _refuse(at, "the schema is too large", "write a smaller one")
        if schema is False:
            return None
        if not isinstance(schema, Mapping):
            _refuse(at, f"{shown(schema)} allows anything", 'give it a "type"')
        heads = [name for name in _HEADS if name in schema]
        if self.old and "$ref" in heads:
            heads, told = ["$ref"], []
        else:
            told = list(schema)
        head = heads[0] if heads else "type"
        told_kinds = _listed(schema["type"]) if heads == ["type"] else list(_KEYWORDS)
        kinds = [kind for kind in told_kinds if isinstance(kind, str) and kind in _KEYWORDS]
        if not kinds or len(kinds) < len(told_kinds):
            _refuse(at, f"type {shown(schema['type'])}", f"pass one of {', '.join(_KEYWORDS)}")
        # Values may come with their type.
        values = schema["enum"] if head == "enum" else [schema["const"]] if head == "const" else []
        if head in ("enum", "const") and heads[1:] == ["type"]:
            heads = heads[:1]
            if not isinstance(values, list) or not all(
                any(_is(kind, value) for kind in _listed(schema["type"])) for value in values
            ):
                _refuse(at, f"values of another type than {shown(schema['type'])}", "correct them")
        kept = set().union(*(_KEYWORDS[kind] for kind in kinds))
        lost = _LOST_HEADS.union(*(_LOST.get(kind, ()) for kind in kinds))
        if head != "type":
            lost |= kept
        unknown = [name for name in told if name in lost]
        if unknown or len(heads) > 1:
            names = ", ".join(map(repr, unknown or heads[1:]))
            _refuse(
                at, f"{names} {f'beside {head!r} ' if head != 'type' else ''}cannot be kept by an "
                "automaton", "leave it out, and check the text yourself",
            )  # fmt: skip
        if not heads:
            _refuse(at, "no type", 'give it a "type", or "anyOf", "enum" or "const"')
        if head == "$ref":
            return self._reference(schema, at, open_)
        if head in ("anyOf", "allOf"):
            return self._several(head, schema[head], at, open_)
        if head in ("enum", "const"):
            if not isinstance(values, list) or not values:
                _refuse(at, f"enum {shown(values)}", "pass a list of values")
            return _any([json_texts.value(value, self.space) for value in values])
        if isinstance(schema.get("required"), bool):
            _refuse(at, f"required {shown(schema['required'])}", "list names beside properties")
        writers = {"string": self._string, "array": self._array, "object": self._object}
        return _any([
            writers[kind](schema, at, open_) if kind in writers else json_texts.SCALARS[kind]
            for kind in kinds
        ])  # fmt: skip

    def _reference(self, schema: Mapping[str, Json], at: str, open_: tuple[int, ...]) -> str | None:
        name = schema["$ref"]
        if not isinstance(name, str):
            _refuse(at, f"$ref {shown(name)}", "pass a text such as '#/$defs/name'")
        try:
            found = self.references.follow(schema, name)
        except (KeyError, ValueError):
            _refuse(
                at, f"$ref {name!r} leads to nothing in this schema",
                "correct it, or put the schema into $defs and refer to it there",
            )  # fmt: skip
        if id(found) in open_:
            _refuse(
                at, f"$ref {name!r} leads to itself, and a recursive schema is no regular language",
                "bound its depth by writing the levels out, or pass specjax.Grammar(schema), which "
                "is slower",
            )  # fmt: skip
        return self.of(found, f"{at}/$ref", (*open_, id(found)))

    def _several(self, head: str, parts: Json, at: str, open_: tuple[int, ...]) -> str | None:
        if not isinstance(parts, list) or not parts or (head == "allOf" and len(parts) > 1):
            most = "one schema" if head == "allOf" else "a list of schemas"
            _refuse(at, f"{head} {shown(parts)}", f"pass {most}")
        return _any([self.of(part, f"{at}/{head}/{n}", open_) for n, part in enumerate(parts)])

    def _string(self, schema: Mapping[str, Json], at: str, open_: object) -> str:
        own = {name: schema[name] for name in _KEYWORDS["string"] if name in schema}
        lengths = {"minLength", "maxLength"} & set(own)
        if ("pattern" in own) + ("format" in own) + bool(lengths) > 1:
            _refuse(at, f"{', '.join(sorted(own))} together", "say it in one pattern")
        if "format" in own:
            form = own["format"]
            if not isinstance(form, str) or form not in _FORMATS:
                _refuse(at, f"format {shown(form)}", f"use {', '.join(_FORMATS)}")
            return f'"{_FORMATS[form]}"'
        if "pattern" in own:
            return f'"{self._pattern(own["pattern"], at)}"'
        least, most = self._counted(own, "minLength", "maxLength", at)
        return f'"{json_texts.CHARACTER}{_times(least, most)}"'

    def _pattern(self, pattern: Json, at: str) -> str:
        """Returns the contents of the strings that a pattern matches as a whole."""
        if not isinstance(pattern, str):
            _refuse(at, f"pattern {shown(pattern)}", "pass a text")
        try:
            inner = patterns.expression(pattern)
        except ValueError as error:
            _refuse(at, f"pattern {shown(pattern)} {error}", "write it in another way")
        # Compiled by itself too, so that an error names it.
        subject = f"the pattern {shown(pattern)} at {at}"
        if byte_automaton.of_expression(subject, inner, absent="\0").example() is None:
            _refuse(
                at, f"pattern {shown(pattern)} matches no text that JSON can write", "correct it"
            )
        return inner

    def _counted(
        self, schema: Mapping[str, Json], least: str, most: str, at: str
    ) -> tuple[int, int | None]:
        """Returns the two counts; by default 0 and None."""
        wanted = f"a whole number in [0, {_REPEATED}] (at {at}), and no {most} below the {least}"
        own: dict[str, int] = {}
        for name in (least, most):
            if name not in schema:
                continue
            count = schema[name]  # JSON has one kind of numbers: 2.0 is a whole one
            count = int(count) if isinstance(count, float) and count.is_integer() else count
            own[name] = whole(name, count, 0, _REPEATED, wanted)
        low, high = own.get(least, 0), own.get(most)
        if high is not None and low > high:
            raise ValueError(f"{least}={low} is not allowed; it must be {wanted}")
        return low, high

    def _array(self, schema: Mapping[str, Json], at: str, open_: tuple[int, ...]) -> str | None:
        first, rest = schema.get("prefixItems"), schema.get("items")
        named = "prefixItems"
        if isinstance(rest, list):  # as drafts before 2020-12 write it
            first, rest, named = rest, schema.get("additionalItems", False), "items"
        low, high = self._counted(schema, "minItems", "maxItems", at)
        if first is not None:
            if not isinstance(first, list) or not first or rest not in (None, False):
                _refuse(at, f"{named} beside other items", 'pass a list, and "items": false')
            if not low <= len(first) <= (len(first) if high is None else high):
                _refuse(at, f"minItems or maxItems beside {named}", "all of its items are written")
            made = [self.of(one, f"{at}/{named}/{n}", open_) for n, one in enumerate(first)]
            parts = [one for one in made if one is not None]
            comma = f"{self.space},{self.space}"
            return json_texts.array(parts, comma, self.space) if len(parts) == len(made) else None
        if "items" not in schema:
            _refuse(at, "an array without items", 'give it "items"')
        item = self.of(rest, f"{at}/items", open_) if high != 0 else None
        if item is None:
            return None if low else json_texts.array([], "", self.space)
        more = (
            f"(?:,{self.space}{item}){_times(max(low, 1) - 1, None if high is None else high - 1)}"
        )
        some = json_texts.array([f"{item}{more}"], "", self.space)
        return some if low else json_texts.array([f"(?:{item}{more})?"], "", self.space)

    def _object(self, schema: Mapping[str, Json], at: str, open_: tuple[int, ...]) -> str | None:
        own, required = schema.get("properties"), schema.get("required", [])
        if not isinstance(own, Mapping):
            _refuse(at, "an object without properties", 'give it "properties"')
        needed = [name for name in _listed(required) if isinstance(name, str) and name in own]
        if not isinstance(required, list) or len(needed) < len(required):
            _refuse(at, f"required {shown(required)}", "name properties of the object")
        # Other properties never occur, so keywords about them hold.
        made = {name: self.of(one, f"{at}/properties/{name}", open_) for name, one in own.items()}
        members = {name: one for name, one in made.items() if one is not None}
        if not set(needed) <= set(members):
            return None
        longest = sum(map(len, members.values())) * (1 if required else len(members))
        if longest > _LONGEST:
            _refuse(at, "the schema is too large", "write a smaller one, or require a property")
        return json_texts.objects(members, needed, self.space)


def _times(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def _any(choices: Sequence[str | None]) -> str | None:
    """Returns the expression that matches one of these."""
    some = [one for one in choices if one is not None]
    return f"(?:{'|'.join(some)})" if some else None


def _listed(kinds: Json) -> list[Json]:
    return kinds if isinstance(kinds, list) else [kinds]


def _is(kind: Json, value: object) -> bool:
    """Returns whether a value of JSON has this type."""
    kinds: dict[str, type | UnionType] = {
        "string": str, "boolean": bool, "null": type(None), "array": list, "object": dict,
        "integer": int, "number": int | float,
    }  # fmt: skip
    if isinstance(value, bool) and kind != "boolean":
        return False
    return isinstance(kind, str) and kind in kinds and isinstance(value, kinds[kind])


def _refuse(at: str, what: str, cure: str) -> NoReturn:
    raise ValueError(f"JSONSchema at {at}: {what}; {cure}")
