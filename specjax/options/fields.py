"""The fields of option classes, and checks of their values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

REQUIRED = object()
"""The default value of an option that must be given."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The base of all option classes.

    A job inherits from several of them, and each calls `super().__post_init__()`, so that all of
    their checks run.
    """

    group: ClassVar[str] = "command"
    """The heading in the help for the options that the class adds to those of its bases."""

    common: ClassVar[tuple[str, ...]] = ()
    """The options that `--help` shows; the others are shown by `--help-all`.  Empty: all."""

    def __post_init__(self) -> None:
        pass


def option(
    default: object,
    text: str,
    *,
    free: bool = False,
    choices: Sequence[str] | None = None,
    names: tuple[str, ...] = (),
    metavar: str | None = None,
    positional: bool = False,
    repeated: bool = False,
) -> Any:
    """Returns a dataclass field with a help text; a tuple is an option with several values.

    Args:
      default: the default, or `REQUIRED`.
      text: the help text.
      free: True if the option may change when a run is resumed.
      choices: the allowed values; None: any.
      names: other names of the option, such as "--color".
      metavar: what stands for the value in the help; by default its type.
      positional: True if the values stand on the command line without a name.
      repeated: True if each value of a tuple takes the option once more.
    """
    metadata = {
        "help": text, "free": free, "choices": choices, "names": names, "metavar": metavar,
        "positional": positional, "repeated": repeated,
    }  # fmt: skip
    if default is REQUIRED:
        return dataclasses.field(kw_only=True, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flag(name: str) -> str:
    """Returns the command-line option of a field."""
    return "--" + name.replace("_", "-")


def at_least(options: object, least: float, *names: str) -> None:
    """Raises ValueError for the first of these fields that is below `least`, infinite or NaN."""
    for name in names:
        value = _finite(options, name)
        if value < least:
            raise ValueError(f"{flag(name)} is {value}; it must be at least {least}")


def above(options: object, bound: float, *names: str) -> None:
    """Raises ValueError for the first of these fields that is at most `bound`, infinite or NaN."""
    for name in names:
        value = _finite(options, name)
        if value <= bound:
            raise ValueError(f"{flag(name)} is {value}; it must be greater than {bound}")


def within(options: object, low: float, high: float, *names: str) -> None:
    """Raises ValueError for the first of these fields that does not lie in [low, high]."""
    for name in names:
        value = _finite(options, name)
        if not low <= value <= high:
            raise ValueError(f"{flag(name)} is {value}; it must lie in [{low}, {high}]")


def matching(options: object, found: object, origin: str, *names: str) -> None:
    """Raises ValueError if `options` and `found` differ in any of these fields.

    The message names the fields that differ; `origin` names the source of `found` in it.
    """
    other = {name: getattr(found, name) for name in names}
    other = {name: value for name, value in other.items() if value != getattr(options, name)}
    if other:
        asked = ", ".join(f"{flag(name)} {getattr(options, name)}" for name in other)
        cure = " ".join(as_argument(name, value) for name, value in other.items())
        raise ValueError(f"{origin} does not fit {asked}: pass {cure}")


def as_argument(name: str, value: object) -> str:
    """Returns an option with its value, as written on a command line."""
    if isinstance(value, bool):
        return flag(name) if value else "--no-" + flag(name)[2:]
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    return f"{flag(name)} {value}"


def _finite(options: object, name: str) -> float:
    value = getattr(options, name)
    if not math.isfinite(value):
        raise ValueError(f"{flag(name)} is {value}; it must be a finite number")
    return value
