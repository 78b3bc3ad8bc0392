"""JSON schemas: which are regular, and what outlines_core has to be told to keep them exactly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from specjax.arguments import shown, whole
from specjax.constraints import byte_automaton
from specjax.constraints.byte_automaton import Bytes

_NOTES = {
    "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description",
    "examples", "readOnly", "title", "writeOnly",
}  # fmt: skip
"""Keywords that say nothing about a value."""

_KEYWORDS = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": set(),
    "number": set(),
    "boolean": set(),
    "null": set(),
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
"""The keywords of each type that are kept."""

_HEADS = ("$ref", "anyOf", "allOf", "enum", "const", "type")
"""A schema is one of these."""

_DAY = "[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])"
_CLOCK = (
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?(?:Z|[+-][01][0-9]:[0-5][0-9])"
)
_HEX = "[0-9a-f]"
_FORMATS = {
    "date": _DAY,
    "time": _CLOCK,
    "date-time": f"{_DAY}T{_CLOCK}",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
}
"""Formats as patterns; the 31st is a day of every month."""

_REPEATED = 1000  # the most items or characters that are counted
_DEPTH, _PARTS = 64, 4096  # of a schema with its references put in


def canonical(schema: object, called: str = "JSONSchema") -> str:
    """A schema as JSON, with its keys in their order.  Raises ValueError if it is none."""
    try:
        fields = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(fields, Mapping):
            raise TypeError(f"it is a {type(fields).__name__}")
        return json.dumps(fields, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{called}({shown(schema)}) is no schema ({error}); pass a dict such as "
            '{"type": "object", "properties": {...}}, or its JSON'
        ) from None


def compile_schema(schema: str, whitespace: str) -> Bytes:
    """The automaton of a schema.

    Raises:
      ValueError: a keyword that cannot be kept, with its name and place; or as
        `byte_automaton.of_request`.
    """
    space = byte_automaton.of_request(f"whitespace={shown(whitespace)}", expression=whitespace)
    if not set(space.used) <= set(b" \t\n\r") or space.example() is None:
        raise ValueError(
            f"whitespace={shown(whitespace)} can write other characters; JSON allows spaces, tabs "
            "and line ends between its tokens"
        )
    plain = _Plain(json.loads(schema))
    # In a group: outlines_core repeats it, and puts it beside other expressions.
    return byte_automaton.of_request(
        "JSONSchema",
        schema=json.dumps(plain.of(plain.root, "#", ())),
        whitespace=f"(?:{whitespace})",
    )


class _Plain:
    """Puts in references, and leaves what outlines_core compiles exactly."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root, self.parts = root, 0

    def of(self, schema: Any, at: str, open_: tuple[str, ...]) -> dict[str, Any]:
        """The schema at a place, inside of the references `open_`."""
        self.parts += 1
        if self.parts > _PARTS or at.count("/") > _DEPTH:
            _refuse(at, "the schema is too large", "write a smaller one")
        if not isinstance(schema, Mapping):
            _refuse(at, f"{shown(schema)} allows anything", 'give it a "type"')
        heads = [name for name in _HEADS if name in schema]
        if not heads and not (set(schema) - _NOTES - set().union(*_KEYWORDS.values())):
            _refuse(at, "no type", 'give it a "type", or "anyOf", "enum" or "const"')
        head = heads[0] if heads else "type"
        # Values may come with their type.
        values = schema["enum"] if head == "enum" else [schema["const"]] if head == "const" else []
        if head in ("enum", "const") and heads[1:] == ["type"]:
            heads = heads[:1]
            if not isinstance(values, list) or not all(
                any(_is(kind, value) for kind in _listed(schema["type"])) for value in values
            ):
                _refuse(at, f"values of another type than {shown(schema['type'])}", "correct them")
        kept = {*heads[:1], "type"} if head in ("enum", "const") else {head}
        if heads and head == "type":
            kept = kept.union(*(_KEYWORDS.get(kind, ()) for kind in _listed(schema["type"])))
        unknown = [name for name in schema if name not in kept and name not in _NOTES]
        if unknown or len(heads) > 1:
            names = ", ".join(map(repr, unknown or heads[1:]))
            _refuse(
                at, f"{names} {f'beside {head!r} ' if head != 'type' else ''}cannot be kept by an "
                "automaton", "leave it out, and check the text yourself",
            )  # fmt: skip
        if head == "$ref":
            return self._reference(schema["$ref"], at, open_)
        if head in ("anyOf", "allOf"):
            return self._several(head, schema[head], at, open_)
        if head in ("enum", "const"):
            return self._values(values, at)
        kinds = _listed(schema["type"])
        if not kinds or any(kind not in _KEYWORDS for kind in kinds):
            _refuse(at, f"type {shown(schema['type'])}", f"pass one of {', '.join(_KEYWORDS)}")
        writers = {"string": self._string, "array": self._array, "object": self._object}
        made = [
            writers[kind](schema, at, open_) if kind in writers else {"type": kind}
            for kind in kinds
        ]
        return made[0] if len(made) == 1 else {"anyOf": made}

    def _reference(self, name: Any, at: str, open_: tuple[str, ...]) -> dict[str, Any]:
        if not isinstance(name, str) or not name.startswith("#"):
            _refuse(at, f"$ref {shown(name)}", "put the schema into $defs and refer to it there")
        if name in open_:
            _refuse(
                at, f"$ref {name!r} leads to itself, and a recursive schema is no regular language",
                "bound its depth by writing the levels out, or pass specjax.Grammar(schema), which "
                "is slower",
            )  # fmt: skip
        found: Any = self.root
        for part in name[1:].split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or part not in found:
                _refuse(at, f"$ref {name!r} leads to nothing", "correct it")
            found = found[part]
        return self.of(found, f"{at}/$ref", (*open_, name))

    def _several(self, head: str, parts: Any, at: str, open_: tuple[str, ...]) -> dict[str, Any]:
        if not isinstance(parts, list) or not parts or (head == "allOf" and len(parts) > 1):
            most = "one schema" if head == "allOf" else "a list of schemas"
            _refuse(at, f"{head} {shown(parts)}", f"pass {most}")
        return {"anyOf": [self.of(part, f"{at}/{head}/{n}", open_) for n, part in enumerate(parts)]}

    def _values(self, values: Any, at: str) -> dict[str, Any]:
        if not isinstance(values, list) or not values:
            _refuse(at, f"enum {shown(values)}", "pass a list of values")
        return {"enum": values}

    def _string(self, schema: Mapping[str, Any], at: str, open_: object) -> dict[str, Any]:
        own = {name: schema[name] for name in _KEYWORDS["string"] if name in schema}
        lengths = {"minLength", "maxLength"} & set(own)
        if ("pattern" in own) + ("format" in own) + bool(lengths) > 1:
            _refuse(at, f"{', '.join(sorted(own))} together", "say it in one pattern")
        if "format" in own:
            if own["format"] not in list(_FORMATS):
                _refuse(at, f"format {shown(own['format'])}", f"use {', '.join(_FORMATS)}")
            return {"type": "string", "pattern": f"(?:{_FORMATS[own['format']]})"}
        if "pattern" in own:
            return {"type": "string", "pattern": self._pattern(own["pattern"], at)}
        self._counted(own, "minLength", "maxLength", at)
        return {"type": "string", **own}

    def _pattern(self, pattern: Any, at: str) -> str:
        """A pattern that matches the whole of a string, and writes nothing that JSON escapes."""
        if not isinstance(pattern, str):
            _refuse(at, f"pattern {shown(pattern)}", "pass a text")
        inner = pattern.removeprefix("^")
        inner = byte_automaton.ascii_digits(inner)
        inner = inner[:-1] if inner.endswith("$") and not inner.endswith("\\$") else inner
        subject = f"the pattern {shown(pattern)} at {at}"
        text = byte_automaton.of_request(subject, expression=f"(?:{inner})")
        escaped = {*b'"\\', *range(0x20)} & set(text.used)
        if escaped:
            _refuse(
                at, f"pattern {shown(pattern)} matches {chr(min(escaped))!r}, which JSON escapes",
                'exclude it, as [^"\\\\\\x00-\\x1f]* excludes all of these characters',
            )  # fmt: skip
        return f"(?:{inner})"

    def _counted(self, own: Mapping[str, Any], least: str, most: str, at: str) -> None:
        wanted = f"a whole number in [0, {_REPEATED}] (at {at}), and no {most} below the {least}"
        counts = [whole(n, own[n], 0, _REPEATED, wanted) for n in (least, most) if n in own]
        if counts != sorted(counts):
            raise ValueError(f"{least}={counts[0]} is not allowed; it must be {wanted}")

    def _array(self, schema: Mapping[str, Any], at: str, open_: Any) -> dict[str, Any]:
        first = schema.get("prefixItems")
        if first is not None:
            others = [name for name in ("minItems", "maxItems") if name in schema]
            if not isinstance(first, list) or not first or schema.get("items", False) is not False:
                _refuse(at, "prefixItems beside items", 'pass a list, and "items": false')
            if any(schema[name] != len(first) for name in others):
                _refuse(at, f"{others[0]} beside prefixItems", "all of its items are written")
            made = [self.of(one, f"{at}/prefixItems/{n}", open_) for n, one in enumerate(first)]
            return {"type": "array", "prefixItems": made}
        if "items" not in schema:
            _refuse(at, "an array without items", 'give it "items"')
        own = {name: schema[name] for name in ("minItems", "maxItems") if name in schema}
        self._counted(own, "minItems", "maxItems", at)
        return {"type": "array", "items": self.of(schema["items"], f"{at}/items", open_), **own}

    def _object(self, schema: Mapping[str, Any], at: str, open_: Any) -> dict[str, Any]:
        own, required = schema.get("properties"), schema.get("required", [])
        if not isinstance(own, Mapping):
            _refuse(at, "an object without properties", 'give it "properties"')
        if not isinstance(required, list) or not all(
            isinstance(name, str) and name in own for name in required
        ):
            _refuse(at, f"required {shown(required)}", "name properties of the object")
        for name in own:
            if json.dumps(name, ensure_ascii=False) != f'"{name}"':
                _refuse(at, f"the property {shown(name)}", "use names without quotes and escapes")
        # Other properties are never written, so what is said of them holds.
        made = {name: self.of(one, f"{at}/properties/{name}", open_) for name, one in own.items()}
        return {"type": "object", "properties": made, "required": required}


def _listed(kinds: Any) -> list[Any]:
    return kinds if isinstance(kinds, list) else [kinds]


def _is(kind: Any, value: object) -> bool:
    """Is a value of JSON of this type?"""
    kinds: dict[Any, Any] = {
        "string": str, "boolean": bool, "null": type(None), "array": list, "object": dict,
        "integer": int, "number": int | float,
    }  # fmt: skip
    if isinstance(value, bool) and kind != "boolean":
        return False
    return isinstance(kind, str) and kind in kinds and isinstance(value, kinds[kind])


def _refuse(at: str, what: str, cure: str) -> NoReturn:
    raise ValueError(f"JSONSchema at {at}: {what}; {cure}")
