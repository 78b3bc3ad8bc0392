"""Resolves the `$ref` of a JSON schema inside of its document: pointers, `$anchor` and `$id`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from urllib.parse import unquote, urljoin

from specjax.types import Json

_ONE = (
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items",
    "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_NAMED = (
    "$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties",
)  # fmt: skip
"""The keywords whose values are a schema, a list of schemas, and schemas by name."""


def is_old(root: Mapping[str, Json]) -> bool:
    """Returns whether a document is of draft 7 or before, where `$ref` overrides its siblings."""
    return re.search(r"draft-0[3-7]\b", str(root.get("$schema"))) is not None


class References:
    """The schemas of a document that a `$ref` may name.

    A schema with an `$id` begins a resource of its own, inside of which `#` means this schema.  The
    contents of `enum`, `const` and `default` are values, and an `$id` in them names nothing.
    """

    def __init__(self, root: Mapping[str, Json]) -> None:
        self._old = is_old(root)
        self._id = "id" if re.search(r"draft-0[34]\b", str(root.get("$schema"))) else "$id"
        self._bases: dict[int, str] = {}  # of each schema, by its identity
        self._named: dict[str, Json] = {"": root}
        self._read(root, "")

    def _read(self, schema: Json, base: str) -> None:
        """Registers the names of a schema and of those inside of it."""
        left = [(schema, base)]
        while left:
            one, base = left.pop()
            if not isinstance(one, Mapping) or id(one) in self._bases:
                continue
            if not (self._old and "$ref" in one):
                base = self._enter(one, base)
            self._bases[id(one)] = base
            left += [(part, base) for part in _parts(one)]

    def _enter(self, schema: Mapping[str, Json], base: str) -> str:
        """Registers the names of one schema.  Returns the address of its resource."""
        own = schema.get(self._id)
        if isinstance(own, str) and not own.startswith("#"):
            base = urljoin(base, own).partition("#")[0]
            self._named.setdefault(base, schema)
        elif isinstance(own, str):  # an anchor of draft 7
            self._named.setdefault(base + own, schema)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := schema.get(keyword), str):
                self._named.setdefault(f"{base}#{anchor}", schema)
        return base

    def follow(self, schema: Mapping[str, Json], name: str) -> Json:
        """Returns the schema that the `$ref` of a schema names.

        Raises:
          KeyError: there is none in the document.
        """
        base = self._bases[id(schema)]
        address, _, fragment = (
            base + name if name.startswith("#") else urljoin(base, name)
        ).partition("#")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._named[f"{address}#{fragment}"]
        found = self._named[address]
        for part in fragment.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and re.fullmatch("0|[1-9][0-9]{0,5}", part):
                found = dict(enumerate(found))[int(part)]
            elif isinstance(found, Mapping):
                found = found[part]
            else:
                raise KeyError(part)
        self._read(found, address)  # it may stand where no schema was expected
        return found


def _parts(schema: Mapping[str, Json]) -> Iterator[Json]:
    for keyword in _ONE:
        yield schema.get(keyword)
    for keyword in _LISTS:
        yield from several if isinstance(several := schema.get(keyword), list) else []
    for keyword in _NAMED:
        yield from named.values() if isinstance(named := schema.get(keyword), Mapping) else []
