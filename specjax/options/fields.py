"""The fields of option classes, and checks of their values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from specjax._internal.checks import outside

SEED = "[0, 4294967295]"
"""The interval of a seed."""

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
        for field in dataclasses.fields(self):
            if (interval := field.metadata.get("interval")) is not None:
                inside(self, interval, field.name)


def option(
    default: object,
    text: str,
    interval: str | None = None,
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
      interval: the numbers that are allowed, such as "[1, inf)", as for `inside`; None always is.
      free: True if the option may change when a run is resumed.
      choices: the allowed values; None: any.
      names: other names of the option, such as "--color".
      metavar: what stands for the value in the help; by default its type.
      positional: True if the values stand on the command line without a name.
      repeated: True if each value of a tuple takes the option once more.
    """
    metadata = {
        "help": text, "interval": interval, "free": free, "choices": choices, "names": names,
        "metavar": metavar, "positional": positional, "repeated": repeated,
    }  # fmt: skip
    if default is REQUIRED:
        return dataclasses.field(kw_only=True, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def count(default: object, text: str, least: int = 1, **more: Any) -> Any:
    """Returns the field of a whole number of at least `least`; `more` is for `option`."""
    return option(default, text, f"[{least}, inf)", **more)


def flag(name: str) -> str:
    """Returns the command-line option of a field."""
    return "--" + name.replace("_", "-")


def inside(options: object, interval: str, *names: str) -> None:
    """Raises ValueError for the first of these fields that is a number outside of an interval.

    What stands behind the interval, as in "[0, 1): 1 averages nothing", is a part of the message.
    """
    interval, colon, why = interval.partition(":")
    for name in names:
        value = getattr(options, name)
        if value is not None and (wanted := outside(value, interval)) is not None:
            raise ValueError(f"{flag(name)} is {value}; it must {wanted}{colon}{why}")


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
