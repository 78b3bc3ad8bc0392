"""Command lines and option files from frozen dataclasses: each field is an option."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import pathlib
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

from specjax.flags import ending, open_streams
from specjax.parallel import join_from, leaving

_FILES = ("config", "set")
REQUIRED = object()
"""The default value of an option that must be given."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The base of all option classes.

    A job inherits from several of them, and each calls `super().__post_init__()`, so that all of
    their checks run.
    """

    def __post_init__(self) -> None:
        pass


T = TypeVar("T", bound=Options)


def option(
    default: object, text: str, *, free: bool = False, choices: Sequence[str] | None = None
) -> Any:
    """Returns a dataclass field with a help text; a tuple is an option with several values.

    Args:
      default: the default, or `REQUIRED`.
      text: the help text.
      free: True if the option may change when a run is resumed.
      choices: the allowed values; None: any.
    """
    metadata = {"help": text, "free": free, "choices": choices}
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


def parse(cls: type[T], argv: list[str] | None = None, description: str | None = None) -> T:
    """Reads `cls` from a command line.

    Options of the command line override those of `--set`, which override those of `--config`.  A
    `ValueError` of a check becomes a usage error.
    """
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        help="a YAML, TOML or JSON file of options, such as a recipe; --set and the command line "
        "override it",
    )
    parser.add_argument(
        "--set",
        nargs="+",
        metavar="KEY=VALUE",
        help="options as in such a file: steps=2, remat=true, data=[a, b]",
    )
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)
    for field in fields:
        kind = hints[field.name]
        if isinstance(kind, types.UnionType):
            kind = next(k for k in typing.get_args(kind) if k is not type(None))
        extra: dict[str, Any] = {"type": kind, "choices": field.metadata.get("choices")}
        if typing.get_origin(kind) is tuple:
            extra |= {"type": typing.get_args(kind)[0], "nargs": "+"}
        if kind is bool:
            extra = {"action": argparse.BooleanOptionalAction}
        required = field.default is dataclasses.MISSING
        default = None if required else field.default
        parser.add_argument(
            flag(field.name),
            default=default,
            required=required,
            help=field.metadata.get("help", " "),
            **extra,
        )
    try:
        values = vars(parser.parse_args(_files_first(parser, argv)))
        values = {name: value for name, value in values.items() if name not in _FILES}
        # Processes must join before JAX is first used, which the checks of the options may do.
        join_from(values)
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    except (ValueError, OSError) as error:
        parser.error(str(error))


def run(main: Callable[[], None]) -> None:
    """Runs a job from the command line, which ends as in `specjax.flags.ending`."""
    open_streams()
    with leaving(), ending(pathlib.Path(sys.argv[0]).stem):
        main()


def _files_first(parser: argparse.ArgumentParser, argv: list[str] | None) -> list[str]:
    """Returns the command line after the options of `--config` and `--set`, which it overrides."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    finder.add_argument("--set", nargs="+", action="extend", default=[])
    named, rest = finder.parse_known_args(argv)
    found: list[str] = []
    if named.config is not None:
        found += _arguments(parser, f"--config {named.config}", _read(pathlib.Path(named.config)))
    for text in named.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set {text}: it must be KEY=VALUE, as in --set steps=2")
        found += _arguments(parser, f"--set {text}", {name: _value(value)})
    return found + rest


def _value(text: str) -> object:
    """Returns the value of a `--set` as in a file; numbers stay texts, as on a command line."""
    if text.startswith("[") and text.endswith("]"):
        parts = (part.strip().strip("'\"") for part in text[1:-1].split(","))
        return [part for part in parts if part]
    return {"true": True, "false": False, "null": None}.get(text, text)


def _arguments(
    parser: argparse.ArgumentParser, origin: str, values: Mapping[str, object]
) -> list[str]:
    """Returns a command line from options by name."""
    known, arguments = {action.dest: action for action in parser._actions}, []
    for name, value in values.items():
        dest = str(name).replace("-", "_")
        if dest not in known or dest in (*_FILES, "help"):
            near = difflib.get_close_matches(dest, sorted(known), 1)
            raise ValueError(
                f"{origin}: {name!r} is not an option of this job; "
                + (f"is it {near[0]!r}?" if near else "--help lists them")
            )
        if isinstance(value, bool):
            if not isinstance(known[dest], argparse.BooleanOptionalAction):
                raise ValueError(f"{origin}: {name} is {value}, but it is not a switch")
            arguments.append(as_argument(dest, value))
        elif isinstance(value, list):
            arguments += [flag(dest), *map(str, value)]
        elif value is not None:  # the value may begin with "-", like an option
            arguments.append(f"{flag(dest)}={value}")
    return arguments


def _read(path: pathlib.Path) -> dict[str, object]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix in (".yaml", ".yml"):
            values = _yaml().safe_load(text)
        elif path.suffix == ".toml":
            values = tomllib.loads(text)
        elif path.suffix == ".json":
            values = json.loads(text)
        else:
            raise ValueError(f"it must end in .yaml, .toml or .json, not in {path.suffix!r}")
    except Exception as error:  # each parser has errors of its own
        raise ValueError(f"--config {path}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(
            f"--config {path} holds a {type(values).__name__}; "
            "it must hold options and their values"
        )
    return values


def _yaml() -> ModuleType:
    try:
        import yaml
    except ModuleNotFoundError:
        raise ValueError(
            "reading YAML needs PyYAML: pip install pyyaml, or write the file as TOML or JSON"
        ) from None
    return yaml
