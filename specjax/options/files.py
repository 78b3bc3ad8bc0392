"""Files of options, and `--set`: their contents as a command line, which the user's overrides."""

from __future__ import annotations

import dataclasses
import difflib
import json
import pathlib
import tomllib
from collections.abc import Mapping, Sequence

from specjax._internal.checks import reworded
from specjax._internal.extras import imported
from specjax.options.fields import Options, as_argument, flag


def arguments_of_files(
    cls: type[Options], config: str | None, settings: Sequence[str]
) -> list[str]:
    """Returns a command line from the file `--config` and the texts of `--set`.

    Raises:
      ValueError: the file cannot be read, or has something that is not an option of `cls`.
    """
    found: list[str] = []
    if config is not None:
        found += _arguments(cls, f"--config {config}", _read(pathlib.Path(config)))
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set {text}: it must be KEY=VALUE, as in --set steps=2")
        found += _arguments(cls, f"--set {text}", {name: _value(value)})
    return found


def _value(text: str) -> object:
    """Returns the value of a `--set` as in a file; numbers stay texts, as on a command line."""
    if text.startswith("[") and text.endswith("]"):
        parts = (part.strip().strip("'\"") for part in text[1:-1].split(","))
        return [part for part in parts if part]
    return {"true": True, "false": False, "null": None}.get(text, text)


def _arguments(cls: type[Options], origin: str, values: Mapping[str, object]) -> list[str]:
    """Returns a command line from options by name."""
    known = {field.name: field for field in dataclasses.fields(cls)}
    arguments: list[str] = []
    for name, value in values.items():
        dest = str(name).replace("-", "_")
        if dest not in known:
            near = difflib.get_close_matches(dest, sorted(known), 1)
            raise ValueError(
                f"{origin}: {name!r} is not an option of this command; "
                + (f"is it {near[0]!r}?" if near else "--help-all lists them")
            )
        is_switch = "bool" in str(known[dest].type)
        if value is not None and isinstance(value, bool) != is_switch:
            says = "a switch, true or false" if is_switch else "not a switch"
            raise ValueError(f"{origin}: {name} is {value}, but it is {says}")
        if isinstance(value, bool):
            arguments.append(as_argument(dest, value))
        elif isinstance(value, list) and known[dest].metadata["repeated"]:
            arguments += [f"{flag(dest)}={each}" for each in value]
        elif isinstance(value, list):
            arguments += [flag(dest), *map(str, value)]
        elif value is not None:  # the value may begin with "-", like an option
            arguments.append(f"{flag(dest)}={value}")
    return arguments


def _read(path: pathlib.Path) -> dict[str, object]:
    with reworded(f"--config {path}: ", kinds=(Exception,)):  # each parser has errors of its own
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix in (".yaml", ".yml"):
            cure = "pip install pyyaml, or write the file as TOML or JSON"
            values = imported("yaml", f"reading YAML needs PyYAML: {cure}").safe_load(text)
        elif path.suffix == ".toml":
            values = tomllib.loads(text)
        elif path.suffix == ".json":
            values = json.loads(text)
        else:
            raise ValueError(f"it must end in .yaml, .toml or .json, not in {path.suffix!r}")
    if not isinstance(values, dict):
        raise ValueError(
            f"--config {path} holds a {type(values).__name__}; "
            "it must hold options and their values"
        )
    return values
