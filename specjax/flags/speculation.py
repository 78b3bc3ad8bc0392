"""Options of proposers and rules; an option that no chosen proposer or rule uses is an error."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack, cast

import specjax
from specjax.contract import Rule
from specjax.drafters import adaptive, arrange, as_chain, drafter_by_name
from specjax.generation import Options

DRAFTERS = {"datastore": None, "drafter": "eagle3", "medusa": "medusa"}
"""The kinds whose arrays are in a folder of their own, `--drafter`, with the folder that comes with
the library; there is none for a datastore.
"""

KINDS = sorted({"auto", *specjax.PROPOSERS, *DRAFTERS} - {"universal"})
"""Names of proposers; `draft` becomes `universal` if the draft has another tokenizer."""

DRAFTED = ("draft", "tree", "dynamic-tree", "first-of")
"""The proposers that need a draft model."""


Value = int | float | Sequence[int] | None
"""The value of an option; the branching of a tree is a sequence."""


class _Parsing(TypedDict, total=False):
    """Keywords of `ArgumentParser.add_argument`."""

    type: Callable[[str], object]
    nargs: str
    action: str


@dataclasses.dataclass(frozen=True)
class Number:
    """An option of some proposers or of some rules."""

    default: Value
    owners: tuple[str, ...]  # the proposers or rules that use it
    help: str = ""
    names: tuple[str, ...] = ()  # other names of the option


NUMBERS = {
    "num_drafts": Number(
        4, ("auto", "draft", "dynamic-tree", "early-exit", "first-of", "forced", "ngram",
            "drafter", "datastore"),
        "draft tokens per target pass (gamma), or depth of a tree; 0 is plain decoding; auto "
        "drafts at most so many, by default 8",
        ("--num-speculative-tokens",),
    ),
    "branching": Number(
        (3, 2, 1), ("tree", "datastore"),
        "children per node, for each level; a datastore drafts a chain without it",
    ),
    "width": Number(
        4, ("dynamic-tree", "drafter"), "nodes expanded per level, and children of each"
    ),
    "num_nodes": Number(16, ("dynamic-tree", "drafter"), "nodes of the tree, including the root"),
    "exit_layer": Number(None, ("early-exit",), "how many target layers draft; default: half"),
    "confidence_threshold": Number(
        0.0, ("draft", "early-exit", "first-of"),
        "end a chain after a draft token with a lower probability than this",
    ),
    "min_share": Number(
        0.0, ("datastore",), "no drafts where the most probable token has a lower probability"
    ),
}  # fmt: skip
"""The options of proposers."""

_RULE_NUMBERS = {
    option: Number(parameter.default, (name,))
    for name, kind in specjax.RULES.items()
    for option, parameter in inspect.signature(kind).parameters.items()
}
"""The options of rules: the fields of their dataclasses."""


def add_numbers_of_proposers(
    parser: argparse._ActionsContainer, lookaheads: Sequence[int] = ()
) -> None:
    """Adds the options of `NUMBERS`.

    With `lookaheads`, `--num-drafts` takes several values, which default to `lookaheads`, and
    `--branching` may be repeated.
    """
    for name, number in NUMBERS.items():
        extra: _Parsing = {"type": float if isinstance(number.default, float) else int}
        if name == "branching":
            extra["nargs"], extra["action"] = "+", "append" if lookaheads else "store"
            more = "; repeat the option for another tree" if lookaheads else ""
            number = dataclasses.replace(number, help=number.help + more)
        elif name == "num_drafts" and lookaheads:
            extra["nargs"] = "+"
            number = dataclasses.replace(number, default=tuple(lookaheads))
        _add(parser, "--proposer", name, number, **extra)


def add_numbers_of_rules(parser: argparse._ActionsContainer) -> None:
    """Adds the fields of the rules, as options."""
    for name, number in _RULE_NUMBERS.items():
        if number.default is False:
            _add(parser, "--rule", name, number, action="store_true")
        else:
            kind = float if isinstance(number.default, float) else int
            _add(parser, "--rule", name, number, type=kind)


def _add(
    parser: argparse._ActionsContainer,
    whose: str,
    name: str,
    number: Number,
    **extra: Unpack[_Parsing],
) -> None:
    default = (
        " ".join(map(str, number.default))
        if isinstance(number.default, Sequence)
        else number.default
    )
    what = f": {number.help}" if number.help else ""
    tail = "" if default is None or default is False else f" (default: {default})"
    help_ = f"for {whose} {', '.join(number.owners)}{what}{tail}"
    # With SUPPRESS an option that was not given is missing from the namespace: see `_given`.
    parser.add_argument(_flag(name), *number.names, default=argparse.SUPPRESS, help=help_, **extra)


def check_numbers(
    arguments: argparse.Namespace, proposers: Sequence[str], rules: Sequence[str]
) -> None:
    """Raises ValueError for an option that none of these proposers or rules uses."""
    for whose, table, asked in (
        ("--proposer", NUMBERS, proposers),
        ("--rule", _RULE_NUMBERS, rules),
    ):
        for name in _given(arguments, table):
            owners = table[name].owners
            if not set(owners) & set(asked):
                raise ValueError(
                    f"{_flag(name)} is not used by {whose} {', '.join(asked)}; "
                    f"leave it out, or use {whose} {' or '.join(owners)}"
                )


def numbers_given(arguments: argparse.Namespace) -> list[str]:
    """Returns the options of proposers that were given."""
    return list(_given(arguments, NUMBERS))


def number_of(arguments: argparse.Namespace, name: str) -> Value:
    """Returns the value of a proposer's option: the given one, or its default."""
    return _given(arguments, NUMBERS).get(name, NUMBERS[name].default)


def reads(kind: str, name: str) -> bool:
    """Returns whether a proposer of this kind uses an option."""
    return kind in NUMBERS[name].owners


def make_rule(arguments: argparse.Namespace, name: str) -> Rule:
    """Returns the rule of this name, with the options that were given."""
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
    """Returns the proposer of this kind, with its weights and the options that were given."""
    if kind == "datastore":
        given = _given(arguments, NUMBERS)
        if given.get("num_drafts") == 0:
            return drafter_by_name("none", target)
        store = specjax.load_datastore(arguments.drafter)
        own = {name: value for name, value in given.items() if reads(kind, name)}
        return store.drafter(target, **cast(dict[str, Any], own))
    if kind in DRAFTERS:
        given = _given(arguments, NUMBERS)
        loaded = specjax.load_drafter(arguments.drafter, target)
        numbers = (given.get(name) for name in ("num_drafts", "num_nodes", "width"))
        return arrange(loaded, *(cast(int | None, number) for number in numbers))
    if ":" in kind:
        return drafter_by_name(kind, target, draft)
    of_auto = vars(arguments).get("drafter_of_auto")
    if kind == "auto" and draft is None and of_auto is not None:
        loaded = specjax.load_drafter(of_auto, target)
        most = cast(int | None, _given(arguments, NUMBERS).get("num_drafts"))
        return adaptive(as_chain(loaded, most)) if most != 0 else drafter_by_name("none", target)
    if kind == "auto" and "num_drafts" not in _given(arguments, NUMBERS):
        return drafter_by_name(kind, target, draft)
    numbers = {name: number_of(arguments, name) for name in NUMBERS if reads(kind, name)}
    gamma = numbers.get("num_drafts")
    if isinstance(gamma, int) and gamma < 0:
        raise ValueError(f"num_drafts={gamma}; it must be 0 (plain) or greater")
    if gamma == 0:
        return drafter_by_name("none", target)
    return drafter_by_name(kind, target, draft, dtype=None, **numbers)


def drafting(
    arguments: argparse.Namespace,
    kind: str,
    target: specjax.LanguageModel,
    draft: specjax.LanguageModel | None,
) -> Options:
    """Returns the arguments of `generate` for the proposer of this kind.

    `auto` with the folder of a drafter is left to `generate`, which follows a plan.
    """
    of_auto = vars(arguments).get("drafter_of_auto")
    if kind == "auto" and draft is None and of_auto is not None:
        if specjax.RULES[arguments.rule].fixes_text() and not numbers_given(arguments):
            return {"drafter": specjax.load_drafter(of_auto, target), "proposer": "auto"}
    return {"drafter": make_drafter(arguments, kind, target, draft)}


def _given(arguments: argparse.Namespace, table: Mapping[str, Number]) -> dict[str, Value]:
    return {name: value for name, value in vars(arguments).items() if name in table}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
