"""A frozen dataclass as a command line: one field, one option, its comment the help text."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")
REQUIRED = object()


def option(default: Any, text: str) -> Any:
    """A dataclass field with a help text.  A tuple becomes an option that takes several values;
    `REQUIRED` as default makes it obligatory."""
    if default is REQUIRED:
        return dataclasses.field(kw_only=True, metadata={"help": text})
    return dataclasses.field(default=default, metadata={"help": text})


def parse(cls: type[T], argv: list[str] | None = None, description: str | None = None) -> T:
    """Read `cls` from the command line; `ValueError`s of its checks become usage errors."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):  # pyright: ignore[reportArgumentType]
        kind = hints[field.name]
        if isinstance(kind, types.UnionType):
            kind = next(k for k in typing.get_args(kind) if k is not type(None))
        extra: dict[str, Any] = {"type": kind}
        if typing.get_origin(kind) is tuple:
            extra = {"type": typing.get_args(kind)[0], "nargs": "+"}
        if kind is bool:
            extra = {"action": argparse.BooleanOptionalAction}
        required = field.default is dataclasses.MISSING
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            default=None if required else field.default,
            required=required,
            help=field.metadata.get("help", " "),
            **extra,
        )
    values = vars(parser.parse_args(argv))
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    try:
        return cls(**values)
    except ValueError as error:
        parser.error(str(error))


def write(options: Any, path: pathlib.Path) -> None:
    """The full resolved options, as JSON beside the run's checkpoints."""
    path.write_text(json.dumps(dataclasses.asdict(options), indent=2, default=str) + "\n")
