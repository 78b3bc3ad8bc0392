"""Options that constrain the output: `--regex`, `--json-schema`, `--choice`."""

from __future__ import annotations

import argparse
import pathlib

from specjax.constraints import Choice, Constraint, JSONSchema, Regex
from specjax.prompts import read_text


def add_constraint_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `constraint` reads."""
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
    """The constraint of these options.

    Raises:
      ValueError, OSError: the file is no schema, or cannot be read.
    """
    if arguments.json_whitespace is not None and arguments.json_schema is None:
        raise ValueError("--json-whitespace is used with --json-schema; leave it out, or add that")
    canonical = arguments.canonical
    if arguments.regex is not None:
        return Regex(arguments.regex, canonical=canonical)
    if arguments.choice is not None:
        return Choice(arguments.choice, canonical=canonical)
    if arguments.json_schema is None:
        if canonical:
            raise ValueError("--canonical is used with --regex, --json-schema or --choice")
        return None
    given = {} if arguments.json_whitespace is None else {"whitespace": arguments.json_whitespace}
    path = pathlib.Path(arguments.json_schema)
    try:
        return JSONSchema(read_text(path), canonical=canonical, **given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
