"""Proposers and rules as options: a number belongs to those that read it, and is refused beside any other."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import specjax
from specjax.drafters import drafter_by_name

KINDS = sorted(set(specjax.PROPOSERS) - {"universal"})
"""Proposers by name; a draft of another tokenizer becomes a universal one by itself."""

DRAFTED = ("draft", "tree", "dynamic-tree", "first-of")
"""Those that ask a draft."""


@dataclasses.dataclass(frozen=True)
class Number:
    default: Any
    owners: tuple[str, ...]  # who reads it
    help: str = ""
    names: tuple[str, ...] = ()  # of the option, beside its own


NUMBERS = {
    "num_drafts": Number(
        4, ("draft", "dynamic-tree", "early-exit", "first-of", "ngram"),
        "guesses per target pass (gamma), or depth; 0 decodes plainly",
        ("--num-speculative-tokens",),
    ),
    "branching": Number((3, 2, 1), ("tree",), "children a node, by level"),
    "width": Number(4, ("dynamic-tree",), "nodes expanded a level, and children of each"),
    "num_nodes": Number(16, ("dynamic-tree",), "nodes kept, the root included"),
    "exit_layer": Number(None, ("early-exit",), "layers of the target that guess; by default half"),
    "confidence_threshold": Number(
        0.0, ("draft", "early-exit", "first-of"), "end a chain behind a guess less probable than this"
    ),
}  # fmt: skip
"""Of proposers."""

_RULE_NUMBERS = {
    option: Number(parameter.default, (name,))
    for name, kind in specjax.RULES.items()
    for option, parameter in inspect.signature(kind).parameters.items()
}
"""Of rules: the fields of their dataclasses."""


def add_numbers_of_proposers(
    parser: argparse.ArgumentParser, lookaheads: Sequence[int] = ()
) -> None:
    """With `lookaheads`, `--num-drafts` takes several values, by default these, and `--branching` comes repeatedly."""
    for name, number in NUMBERS.items():
        extra: dict[str, Any] = {"type": float if isinstance(number.default, float) else int}
        if name == "branching":
            extra |= {"nargs": "+", "action": "append" if lookaheads else "store"}
            number = dataclasses.replace(
                number, help=number.help + ("; again for another tree" if lookaheads else "")
            )
        elif name == "num_drafts" and lookaheads:
            extra["nargs"] = "+"
            number = dataclasses.replace(number, default=tuple(lookaheads))
        _add(parser, "--proposer", name, number, **extra)


def add_numbers_of_rules(parser: argparse.ArgumentParser) -> None:
    for name, number in _RULE_NUMBERS.items():
        switch = number.default is False
        _add(
            parser,
            "--rule",
            name,
            number,
            **{"action": "store_true"} if switch else {"type": type(number.default)},
        )


def _add(
    parser: argparse.ArgumentParser, whose: str, name: str, number: Number, **extra: Any
) -> None:
    default = (
        " ".join(map(str, number.default)) if isinstance(number.default, tuple) else number.default
    )
    what = f": {number.help}" if number.help else ""
    tail = "" if default is None else f" (default: {default})"
    help_ = f"of {whose} {', '.join(number.owners)}{what}{tail}"
    # SUPPRESS, so that options given explicitly can be told apart.
    parser.add_argument(_flag(name), *number.names, default=argparse.SUPPRESS, help=help_, **extra)


def check_numbers(
    arguments: argparse.Namespace, proposers: Sequence[str], rules: Sequence[str]
) -> None:
    """Raises ValueError for a number that none of these proposers or rules reads."""
    for whose, table, asked in (
        ("--proposer", NUMBERS, proposers),
        ("--rule", _RULE_NUMBERS, rules),
    ):
        for name in _given(arguments, table):
            owners = table[name].owners
            if not set(owners) & set(asked):
                raise ValueError(
                    f"{_flag(name)} is not used by {whose} {', '.join(asked)}; leave it out, or use {whose} "
                    f"{' or '.join(owners)}"
                )


def number_of(arguments: argparse.Namespace, name: str) -> Any:
    """A number of a proposer, as given or by default."""
    return _given(arguments, NUMBERS).get(name, NUMBERS[name].default)


def reads(kind: str, name: str) -> bool:
    """Does a proposer of this kind read that number?"""
    return kind in NUMBERS[name].owners


def make_rule(arguments: argparse.Namespace, name: str) -> Any:
    """The rule of that name, with those of its numbers that were given."""
    given = _given(arguments, _RULE_NUMBERS)
    return specjax.RULES[name](
        **{key: value for key, value in given.items() if name in _RULE_NUMBERS[key].owners}
    )


def make_drafter(
    arguments: argparse.Namespace,
    kind: str,
    target: specjax.LanguageModel,
    draft: specjax.LanguageModel | None,
) -> specjax.Drafter:
    """The proposer of that kind with its weights, and with the numbers that were given."""
    if kind == "medusa":
        return specjax.load_medusa(arguments.adapter, target)
    if ":" in kind:
        return drafter_by_name(kind, target, draft)
    numbers = {name: number_of(arguments, name) for name in NUMBERS if reads(kind, name)}
    if numbers.get("num_drafts") == 0:
        return drafter_by_name("none", target)
    return drafter_by_name(kind, target, draft, **numbers)


def _given(arguments: argparse.Namespace, table: Mapping[str, Number]) -> dict[str, Any]:
    return {name: value for name, value in vars(arguments).items() if name in table}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
