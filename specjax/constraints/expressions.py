"""The constraints that a user gives: `Regex`, `JSONSchema`, `Choice`, `Grammar`."""

from __future__ import annotations

import abc
import dataclasses
import json
from collections.abc import Mapping, Sequence

from specjax._internal.checks import flag, items, reworded, shown, typed
from specjax.constraints import byte_automaton, schemas
from specjax.constraints.byte_automaton import Bytes
from specjax.types import Json


class Expression(abc.ABC):
    """The set of texts that a row may emit, whatever the vocabulary."""

    canonical: bool
    """True: characters that must follow are spelt as the tokenizer spells them.  The set of texts
    stays the same, more tokens are forced, and the target reads keys and names as it has learned
    them.
    """

    @property
    @abc.abstractmethod
    def key(self) -> str:
        """The value by which expressions are compared."""

    @abc.abstractmethod
    def compile(self) -> Bytes:
        """Compiles the expression to an automaton.

        Raises:
          ValueError: the expression cannot be compiled, or not within the bounds on states and
            seconds.
        """


@dataclasses.dataclass(frozen=True)
class Regex(Expression):
    r"""Allows the texts that a regular expression matches from the first to the last character.

    The syntax is that of Rust's `regex`: as in Python's `re`, without look-around, back-references
    and \b; `.` is any character but a newline, and \d one of 0 to 9.

    Example:
      >>> specjax.generate(target, "The answer is ", constraint=Regex("[0-9]{1,3}"))
    """

    expression: str
    canonical: bool = False

    def __post_init__(self) -> None:
        flag("canonical", self.canonical)
        typed("a text, as in Regex('[0-9]+')", str, Regex=self.expression)

    @property
    def key(self) -> str:
        return json.dumps(["regex", self.expression])

    def compile(self) -> Bytes:
        subject = f"Regex({shown(self.expression)})"
        expression = byte_automaton.ascii_digits(self.expression)
        return byte_automaton.of_expression(
            subject, expression, byte_automaton.absent_from(expression)
        )


@dataclasses.dataclass(frozen=True)
class JSONSchema(Expression):
    r"""Allows the texts that are JSON of a schema.

    The keys of an object stand in the order of the schema, optional ones may be left out, and
    others do not occur.  Keys and the values of `enum` and `const` are written as `json.dumps` with
    `ensure_ascii=False` writes them, and in the strings of a `pattern` or `format` a character is
    escaped only if it must be.  All items of `prefixItems` are present.  A keyword of JSON Schema
    that cannot be kept is refused by its name, and one that JSON Schema does not know is ignored.

    Attributes:
      schema: a dict, or its JSON as a text.
      whitespace: a regular expression for the white space between the tokens of JSON: at most one
        space by default.  With "" a text has none, so more of it is forced.
      canonical: as in `Expression`.
      before, after: texts around the JSON, such as the tags of a call.

    Example:
      >>> schema = {"type": "object", "properties": {"age": {"type": "integer"}}}
      >>> specjax.generate(target, "Bob is 7. As JSON: ", constraint=JSONSchema(schema))
    """

    schema: Mapping[str, Json] | str
    whitespace: str = "[ ]?"
    canonical: bool = False
    before: str = ""
    after: str = ""

    def __post_init__(self) -> None:
        flag("canonical", self.canonical)
        typed("a regular expression", str, whitespace=self.whitespace)
        typed("a text", str, before=self.before, after=self.after)
        object.__setattr__(self, "schema", schemas.canonical(self.schema))

    @property
    def key(self) -> str:
        return json.dumps(["schema", self.schema, self.whitespace, self.before, self.after])

    def compile(self) -> Bytes:
        assert isinstance(self.schema, str)
        return schemas.compile_schema(self.schema, self.whitespace, self.before, self.after)


@dataclasses.dataclass(frozen=True)
class Choice(Expression):
    """Allows one of these texts.

    Example:
      >>> specjax.generate(target, "Is it true? ", constraint=Choice(["yes", "no"]))
    """

    texts: Sequence[str]
    canonical: bool = False

    def __post_init__(self) -> None:
        flag("canonical", self.canonical)
        texts = items(self.texts)
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(
                f"Choice({shown(self.texts)}); pass a list of texts, none of them empty"
            )
        with reworded(f"Choice({shown(texts)}) cannot be encoded (", ")"):
            "".join(texts).encode()
        object.__setattr__(self, "texts", tuple(texts))

    @property
    def key(self) -> str:
        return json.dumps(["choice", *self.texts])

    def compile(self) -> Bytes:
        return byte_automaton.of_texts(self.texts)


@dataclasses.dataclass(frozen=True)
class Grammar:
    r"""Allows the texts of a context-free grammar, which may nest without a bound.

    No automaton can represent them.  A matcher on the host follows each text between the draft and
    its verification, so a step is slower than under the other constraints; see
    `docs/constraints.md`.

    Attributes:
      grammar: a grammar in the Lark dialect of llguidance, whose first rule is `start`; a grammar
        in the GBNF of llama.cpp, which has `::=`; or a JSON schema, as a dict or as its JSON, which
        may be recursive.
      whitespace: for a schema, a regular expression for the white space between the tokens of JSON:
        at most one space by default.

    Example:
      >>> Grammar('start: "(" start ")" | "x"')
    """

    grammar: str | Mapping[str, Json]
    whitespace: str = "[ ]?"

    def __post_init__(self) -> None:
        typed("a regular expression", str, whitespace=self.whitespace)
        text = self.grammar
        if isinstance(text, Mapping) or (isinstance(text, str) and text.lstrip()[:1] == "{"):
            text = schemas.canonical(text, "Grammar")
        if not isinstance(text, str) or not text.strip():
            raise ValueError(
                f"Grammar({shown(text)}); pass a text such as "
                """Grammar('start: "(" start ")" | "x"'), or a JSON schema"""
            )
        object.__setattr__(self, "grammar", text)

    @property
    def is_schema(self) -> bool:
        """True if the constraint is a JSON schema."""
        assert isinstance(self.grammar, str)
        return self.grammar.lstrip().startswith("{")

    @property
    def key(self) -> str:
        """The value by which grammars are compared."""
        return json.dumps([self.grammar, self.whitespace])
