"""Reads the fields of a JSON file by what each of them may hold.

A table maps the name of a field to its `Kind`, and `check` compares a whole file with it: its error
names every field that does not fit, with its value and the allowed ones.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

_GREATEST: Final = 3.4e38  # of float32
_LEAST: Final = 1.2e-38  # of float32


@dataclasses.dataclass(frozen=True)
class Kind:
    """The values that a field may have.

    Attributes:
      wanted: the values in words, after "it must be".
      accepts: returns whether a value is one of them.
    """

    wanted: str
    accepts: Callable[[Any], bool]

    def fault(self, name: str, value: object) -> str | None:
        """Returns a sentence about a value that is not allowed; None: it is allowed."""
        if self.accepts(value):
            return None
        return f"{name} is {as_json(value)}; it must be {self.wanted}"

    def of(self, name: str, value: object) -> Any:
        """Returns the value of a field.  Raises ValueError if it is not allowed."""
        if (fault := self.fault(name, value)) is not None:
            raise ValueError(fault)
        return value

    def read(self, fields: Mapping[str, object], name: str, default: object = None) -> Any:
        """Returns a field, or `default` if it is missing or null.

        Raises:
          ValueError: another value.
          KeyError: the field is missing, and has no default.
        """
        value = fields[name] if default is None else fields.get(name)
        return self.of(name, default if value is None and default is not None else value)


def check(
    fields: Mapping[str, object], kinds: Mapping[str, Kind], *, optional: bool = True
) -> None:
    """Raises ValueError with every field that does not fit its kind.

    Args:
      fields: of a file.
      kinds: of the fields, by name.
      optional: a field may be missing or null.
    """
    faults = []
    for name, kind in kinds.items():
        if optional and fields.get(name) is None:
            continue
        if name not in fields:
            faults.append(f"it lacks {name!r}, which must be {kind.wanted}")
        elif (fault := kind.fault(name, fields[name])) is not None:
            faults.append(fault)
    if faults:
        raise ValueError("; ".join(faults))


def parse_object(content: bytes | str, name: object) -> dict[str, Any]:
    """Returns the JSON object that the content of a file is.

    Raises:
      ValueError: it is another value, or not JSON; the message has the name.
    """
    try:
        value = json.loads(content)
        what = f"holds a {type(value).__name__}, not an object"
    except (ValueError, RecursionError) as error:  # broken UTF-8 is a ValueError too
        value, what = None, f"is not JSON: {error}"
    if not isinstance(value, dict):
        raise ValueError(f"{name} {what}; download it again")
    return value


def as_json(value: object) -> str:
    """Returns a value as the file has it, cut if it is long."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 500 else text[:500] + "..."


def is_whole(value: object) -> bool:
    """Returns whether a value is a whole number; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Returns whether a value is a number that float32 holds; true, false and NaN are not.

    Python's JSON reader accepts NaN and infinities.  A model that computes with one would emit the
    same token for ever.
    """
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _GREATEST
    )


def count(least: int = 1, most: int | None = None) -> Kind:
    """Returns the kind of a whole number in [least, most]."""
    bounds, top = f"of at least {least}", math.inf if most is None else most
    bounds += "" if most is None else f" and at most {most}"
    return Kind(f"a whole number {bounds}", lambda value: is_whole(value) and least <= value <= top)


def real(
    *, above: float | None = None, least: float | None = None, most: float | None = None
) -> Kind:
    """Returns the kind of a finite number above `above`, of at least `least`, and at most `most`.

    What float32 rounds to 0 is not above 0.
    """
    bounds = [f"above {above:g}"] if above is not None else []
    bounds += [f"of at least {least:g}"] if least is not None else []
    bounds += [f"{'and ' if bounds else 'of '}at most {most:g}"] if most is not None else []

    def accepts(value: Any) -> bool:
        if (
            not is_number(value)
            or (most is not None and value > most)
            or (least is not None and value < least)
        ):
            return False
        return above is None or (value > above and abs(value) >= _LEAST)

    return Kind(" ".join(["a finite number", *bounds]), accepts)


def one_of(values: Collection[object]) -> Kind:
    """Returns the kind of a few values."""
    listed = ", ".join(map(as_json, values))
    return Kind(
        f"one of {listed}"
        if len(values) > 1
        else f"{listed}, the only value that specjax supports",
        lambda value: (
            isinstance(value, str | int | float | None)
            and any(
                value == one and isinstance(value, bool) == isinstance(one, bool) for one in values
            )
        ),
    )


def list_of(kind: Kind, entries: str = "entries", length: int | None = None) -> Kind:
    """Returns the kind of a list of `length` entries (None: of any number), each of one kind."""
    many = f"a list of {entries}" if length is None else f"a list of {length} {entries}"
    return Kind(
        f"{many}, each of them {kind.wanted}",
        lambda value: (
            isinstance(value, list)
            and (length is None or len(value) == length)
            and all(map(kind.accepts, value))
        ),
    )


FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a text", lambda value: isinstance(value, str))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
LIST = Kind("a list", lambda value: isinstance(value, list))
LAYERS = Kind(
    "a list of layers", lambda value: isinstance(value, list) and all(map(is_whole, value))
)
