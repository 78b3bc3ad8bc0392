"""Options that constrain the output: `--regex`, `--json-schema`, `--choice`, `--grammar`."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, TypeVar

from specjax._internal.checks import reworded, settle
from specjax.constraints import Choice, Constraint, Grammar, JSONSchema, Regex
from specjax.generation import read_text
from specjax.options.fields import Options, flag, option

Made = TypeVar("Made", Grammar, JSONSchema)


@dataclasses.dataclass(frozen=True)
class ConstraintOptions(Options):
    """What the output has to match, in one of four ways."""

    group = "constraint"

    regex: str | None = option(None, "the output matches this expression", metavar="EXPRESSION")
    json_schema: str | None = option(
        None, "the output is JSON of the schema in this file", metavar="FILE"
    )
    choice: tuple[str, ...] = option(
        (), "the output is this text; repeat the option for others to choose from", metavar="TEXT",
        repeated=True,
    )  # fmt: skip
    grammar: str | None = option(
        None,
        "the output is a text of the grammar in this file (Lark or GBNF), or JSON of a recursive "
        "schema; slower than the others, and --max-new-tokens may cut it",
        metavar="FILE",
    )
    json_whitespace: str | None = option(
        None,
        "with --json-schema: the white space between the tokens of JSON, as an expression; "
        "default: at most one space",
        metavar="EXPRESSION",
    )
    canonical: bool = option(
        False,
        "with --regex, --json-schema or --choice: write what is forced only as the tokenizer "
        "spells it, which is faster",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        ways = {name: getattr(self, name) for name in ("regex", "json_schema", "choice", "grammar")}
        given = [flag(name) for name, value in ways.items() if value not in (None, ())]
        two = " is not allowed with ".join(given[:2])
        settle(
            (len(given) > 1, f"{two}: leave one of them out"),
            (
                self.json_whitespace is not None and self.json_schema is None,
                "--json-whitespace is used with --json-schema; leave it out, or add that",
            ),
            (
                self.canonical and given in ([], ["--grammar"]),
                "--canonical is used with --regex, --json-schema or --choice",
            ),
        )

    def constraint(self) -> Constraint | None:
        """Returns the constraint of these options.

        Raises:
          ValueError, OSError: the file is not a schema, or cannot be read.
        """
        if self.regex is not None:
            return Regex(self.regex, canonical=self.canonical)
        if self.grammar is not None:
            return _read(Grammar, self.grammar)
        if self.choice:
            return Choice(self.choice, canonical=self.canonical)
        if self.json_schema is None:
            return None
        given = {} if self.json_whitespace is None else {"whitespace": self.json_whitespace}
        return _read(JSONSchema, self.json_schema, canonical=self.canonical, **given)


def _read(kind: type[Made], name: str, **settings: Any) -> Made:
    """Returns the constraint in a file."""
    path = pathlib.Path(name)
    with reworded(f"{path}: "):
        return kind(read_text(path), **settings)
