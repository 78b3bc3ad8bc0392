"""Options that constrain the output: `--regex`, `--json-schema`, `--choice`, `--grammar`."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any, TypeVar

from specjax.constraints import Choice, Constraint, Grammar, JSONSchema, Regex
from specjax.generation import read_text

Made = TypeVar("Made", Grammar, JSONSchema)


def add_constraint_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `constraint` reads."""
    group = parser.add_argument_group("constraint")
    own = group.add_mutually_exclusive_group()
    own.add_argument("--regex", metavar="EXPRESSION", help="the output matches this expression")
    own.add_argument(
        "--json-schema", metavar="FILE", help="the output is JSON of the schema in this file"
    )
    own.add_argument(
        "--choice", action="append", metavar="TEXT",
        help="the output is this text; repeat the option for others to choose from",
    )  # fmt: skip
    own.add_argument(
        "--grammar", metavar="FILE",
        help="the output is a text of the grammar in this file (Lark or GBNF), or JSON of a "
        "recursive schema; slower than the others, and --max-new-tokens may cut it",
    )  # fmt: skip
    group.add_argument(
        "--json-whitespace", metavar="EXPRESSION",
        help="with --json-schema: the white space between the tokens of JSON, as an expression; "
        "default: at most one space",
    )  # fmt: skip
    group.add_argument(
        "--canonical", action="store_true",
        help="with --regex, --json-schema or --choice: write what is forced only as the tokenizer "
        "spells it, which is faster",
    )  # fmt: skip


def constraint(arguments: argparse.Namespace) -> Constraint | None:
    """Returns the constraint of these options.

    Raises:
      ValueError, OSError: the file is not a schema, or cannot be read.
    """
    if arguments.json_whitespace is not None and arguments.json_schema is None:
        raise ValueError("--json-whitespace is used with --json-schema; leave it out, or add that")
    canonical = arguments.canonical
    if arguments.regex is not None:
        return Regex(arguments.regex, canonical=canonical)
    if arguments.grammar is not None:
        if canonical:
            raise ValueError("--canonical is used with --regex, --json-schema or --choice")
        return _read(Grammar, arguments.grammar)
    if arguments.choice is not None:
        return Choice(arguments.choice, canonical=canonical)
    if arguments.json_schema is None:
        if canonical:
            raise ValueError("--canonical is used with --regex, --json-schema or --choice")
        return None
    given = {} if arguments.json_whitespace is None else {"whitespace": arguments.json_whitespace}
    return _read(JSONSchema, arguments.json_schema, canonical=canonical, **given)


def _read(kind: type[Made], name: str, **settings: Any) -> Made:
    """Returns the constraint in a file."""
    path = pathlib.Path(name)
    try:
        return kind(read_text(path), **settings)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
