"""A frozen dataclass as a command line and as a file: one field, one option, its comment the help text."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from specjax.parallel import join_from, leaving

T = TypeVar("T")
REQUIRED = object()


@dataclasses.dataclass(frozen=True)
class Options:
    """What classes of options share, so that the checks of all of them run where a job has several:
    each calls `super().__post_init__()`."""

    def __post_init__(self):
        pass


def option(default: Any, text: str, *, free: bool = False, choices: Any = None) -> Any:
    """A dataclass field with a help text.  A tuple becomes an option that takes several values;
    `REQUIRED` as default makes it obligatory; `free` says that it may change when a run is resumed."""
    metadata = {"help": text, "free": free, "choices": choices}
    if default is REQUIRED:
        return dataclasses.field(kw_only=True, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flag(name: str) -> str:
    """The option of a field."""
    return "--" + name.replace("_", "-")


def at_least(options: Any, least: float, *names: str) -> None:
    """Raises ValueError for the first of these fields that is smaller, infinite or NaN."""
    for name in names:
        value = _finite(options, name)
        if value < least:
            raise ValueError(f"{flag(name)} is {value}; it must be at least {least}")


def above(options: Any, bound: float, *names: str) -> None:
    """Raises ValueError for the first of these fields that is not greater, infinite or NaN."""
    for name in names:
        value = _finite(options, name)
        if value <= bound:
            raise ValueError(f"{flag(name)} is {value}; it must be greater than {bound}")


def within(options: Any, low: float, high: float, *names: str) -> None:
    """Raises ValueError for the first of these fields that does not lie in [low, high]."""
    for name in names:
        value = _finite(options, name)
        if not low <= value <= high:
            raise ValueError(f"{flag(name)} is {value}; it must lie in [{low}, {high}]")


def matching(options: Any, found: Any, origin: str, *names: str) -> None:
    """Raises ValueError where `found` has other values in fields that options of the same names ask
    for.  The message names these fields alone."""
    other = {name: getattr(found, name) for name in names}
    other = {name: value for name, value in other.items() if value != getattr(options, name)}
    if other:
        asked = ", ".join(f"{flag(name)} {getattr(options, name)}" for name in other)
        cure = " ".join(as_argument(name, value) for name, value in other.items())
        raise ValueError(f"{origin} does not fit {asked}: pass {cure}")


def as_argument(name: str, value: Any) -> str:
    """An option with its value, as on a command line."""
    if isinstance(value, bool):
        return flag(name) if value else "--no-" + flag(name)[2:]
    return f"{flag(name)} {value}"


def _finite(options: Any, name: str) -> float:
    value = getattr(options, name)
    if not math.isfinite(value):
        raise ValueError(f"{flag(name)} is {value}; it must be a finite number")
    return value


def parse(
    cls: type[T],
    argv: list[str] | None = None,
    description: str | None = None,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
) -> T:
    """Read `cls` from the command line, over what `--config` says, over what `--preset` (one of `presets`) says.

    `ValueError`s of its checks become usage errors.
    """
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", help="a YAML, TOML or JSON file of options; those of the command line win"
    )
    if presets is not None:
        parser.add_argument(
            "--preset",
            choices=sorted(presets),
            help="a published recipe; other options win over it",
        )
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
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
        arguments = _file_first(parser, argv)
        if presets is not None:
            arguments = _preset_first(parser, arguments, presets)
        values = vars(parser.parse_args(arguments))
        values = {name: value for name, value in values.items() if name not in ("config", "preset")}
        # Before JAX is asked anything, which a check of the options may do.
        join_from(values)
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    except (ValueError, OSError) as error:
        parser.error(str(error))


def run(main: Callable[[], None]) -> None:
    """Run a job from the command line.  What a user can mend ends in its message and exit status 2."""
    with leaving():
        try:
            main()
        except (ValueError, OSError, FloatingPointError) as error:
            print(f"{pathlib.Path(sys.argv[0]).stem}: {error}", file=sys.stderr)
            sys.exit(2)


def _file_first(parser: argparse.ArgumentParser, argv: list[str] | None) -> list[str] | None:
    """The command line with the options of `--config` before its own, so that these win."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    found, rest = finder.parse_known_args(argv)
    if found.config is None:
        return argv
    return _arguments(parser, f"--config {found.config}", _read(pathlib.Path(found.config))) + rest


def _preset_first(
    parser: argparse.ArgumentParser,
    argv: list[str] | None,
    presets: Mapping[str, Mapping[str, Any]],
) -> list[str] | None:
    """The command line with the options of `--preset` before its own."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--preset")
    found, rest = finder.parse_known_args(argv)
    if found.preset not in presets:
        return argv  # where an unknown one is an error that lists them
    return _arguments(parser, f"--preset {found.preset}", presets[found.preset]) + rest


def _arguments(
    parser: argparse.ArgumentParser, origin: str, values: Mapping[str, Any]
) -> list[str]:
    """Options by name as a command line."""
    known, found = {action.dest: action for action in parser._actions}, []
    for name, value in values.items():
        dest = str(name).replace("-", "_")
        if dest not in known or dest in ("config", "help"):
            raise ValueError(f"{origin}: {name!r} is not an option of this job; --help lists them")
        if isinstance(value, bool):
            if not isinstance(known[dest], argparse.BooleanOptionalAction):
                raise ValueError(f"{origin}: {name} is {value}, but it is not a switch")
            found.append(as_argument(dest, value))
        elif value is not None:
            found += [flag(dest), *map(str, value if isinstance(value, list) else [value])]
    return found


def _read(path: pathlib.Path) -> dict[str, Any]:
    text = path.read_text()
    try:
        if path.suffix in (".yaml", ".yml"):
            values = _yaml().safe_load(text)
        elif path.suffix == ".toml":
            values = tomllib.loads(text)
        elif path.suffix == ".json":
            values = json.loads(text)
        else:
            raise ValueError(f"it must end in .yaml, .toml or .json, not in {path.suffix!r}")
    except Exception as error:  # each format has its own
        raise ValueError(f"--config {path}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(
            f"--config {path} holds a {type(values).__name__}; it must hold options and their values"
        )
    return values


def _yaml() -> Any:
    try:
        import yaml
    except ModuleNotFoundError:
        raise ValueError(
            "reading YAML needs PyYAML: pip install pyyaml, or write the file as TOML or JSON"
        ) from None
    return yaml
