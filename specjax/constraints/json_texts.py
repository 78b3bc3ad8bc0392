r"""Expressions of the texts of JSON: strings, numbers, values, arrays and objects.

An expression is in the syntax of Rust's `regex`.  `space` is the expression of the white space
between two tokens of JSON, in a group.  No text contains U+0000, which JSON escapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from specjax.types import Json

_HEX = "[0-9a-fA-F]"
# \uXXXX writes one character.  Halves of a pair do not occur: such a character stands as it is.
CHARACTER = (r'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u(?:[0-9a-ceA-CEfF]XXX|[dD][0-7]XX)))').replace(
    "X", _HEX
)
"""One character of a string, of which `minLength` and `maxLength` count as one."""

INTEGER = "-?(?:0|[1-9][0-9]*)"
SCALARS = {
    "string": f'"{CHARACTER}*"',
    "integer": INTEGER,
    "number": rf"{INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?",
    "boolean": "(?:true|false)",
    "null": "null",
}
"""The texts of each type that has no items or members."""


def literal(text: str) -> str:
    """Returns the expression of one text."""
    return re.sub(r"[^A-Za-z0-9_]", lambda found: f"\\x{{{ord(found[0]):x}}}", text)


def encoded(value: object) -> str:
    """Returns the JSON of a value, unescaped except for unpaired surrogates."""
    text = json.dumps(value, ensure_ascii=False)
    return re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)


def value(content: Json, space: str) -> str:
    """Returns the texts of one value of JSON.  The keys of objects stand in their order."""
    if isinstance(content, list):
        return array([value(one, space) for one in content], f",{space}", space)
    if isinstance(content, Mapping):
        members = {name: value(one, space) for name, one in content.items()}
        return objects(members, list(content), space)
    return literal(encoded(content))


def array(parts: Sequence[str], comma: str, space: str) -> str:
    """Returns the expression of an array of these items, with `comma` between two of them."""
    return rf"\[{space}{comma.join(parts)}{space if parts else ''}\]"


def objects(members: Mapping[str, str], required: Sequence[str], space: str) -> str:
    """Returns the expression of objects with these members in order; only required ones must occur.

    With a required member a comma belongs to the member that is further from it.  Otherwise there
    is an alternative for each member that may be the last one.
    """
    comma = f"{space},"
    written = [f"{space}{literal(encoded(name))}{space}:{space}{members[name]}" for name in members]
    needed = [name in required for name in members]

    def before(end: int) -> str:
        return "".join(
            f"{one}{comma}" if must else f"(?:{one}{comma})?"
            for one, must in zip(written[:end], needed[:end], strict=True)
        )

    if any(needed):
        last = max(at for at, must in enumerate(needed) if must)
        after = "".join(f"(?:{comma}{one})?" for one in written[last + 1 :])
        inner = before(last) + written[last] + after
    else:
        endings = [before(at) + one for at, one in enumerate(written)]
        inner = f"(?:{'|'.join(endings)})?" if endings else ""
    return rf"\{{{inner}{space}\}}"
