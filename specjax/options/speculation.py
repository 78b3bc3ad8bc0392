"""The options of proposers and rules; one that no chosen proposer or rule uses is an error."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import specjax
from specjax.contract import Rule
from specjax.drafters import SELF
from specjax.options.fields import Options, flag, option

DRAFTERS = {"datastore": None, "drafter": "eagle3", "medusa": "medusa"}
"""The kinds whose arrays are in a folder of their own, `--drafter`, with the folder that comes with
the library; there is none for a datastore.
"""

KINDS = sorted({"auto", "mtp", *SELF, *specjax.PROPOSERS, *DRAFTERS} - {"universal"})
"""Names of proposers; `draft` becomes `universal` if the draft has another tokenizer."""

DRAFTED = ("draft", "tree", "dynamic-tree", "first-of")
"""The proposers that need a draft model."""

WITH_DEPTH = (
    "auto", "draft", "dynamic-tree", "early-exit", "first-of", "forced", "ngram", "drafter",
    "datastore", "mtp", *SELF,
)  # fmt: skip
"""The proposers with `--num-drafts`."""

DEPTH = (
    "draft tokens per target pass (gamma), or depth of a tree; 0 is plain decoding; auto drafts at "
    "most 8 by default"
)
BRANCHING = "children per node, for each level; a datastore drafts a chain without it"

Value = int | float | Sequence[int] | None
"""The value of an option; the branching of a tree is a sequence."""


def number(
    value: Value,
    owners: tuple[str, ...],
    text: str,
    whose: str = "--proposer",
    default: object = None,
    **more: Any,
) -> Any:
    """Returns a field of a number that belongs to some proposers or rules.

    Args:
      value: the number if it is not given.
      owners: the proposers or rules that use it.
      text: the help text.
      whose: the option that names them.
      default: the default of the field, which says that the number is not given.
      **more: for `option`.
    """
    says = "" if value is None or value is False else f" (default: {_words(value)})"
    made = option(None, f"for {whose} {', '.join(owners)}{text and ': '}{text}{says}", **more)
    metadata = {**made.metadata, "owners": owners, "value": value, "whose": whose}
    return dataclasses.field(default=default, metadata=metadata)


def _words(value: Value) -> str:
    return " ".join(map(str, value)) if isinstance(value, Sequence) else str(value)


@dataclasses.dataclass(frozen=True)
class NumberOptions(Options):
    """The numbers of proposers, except for those of which `specjax bench` compares several."""

    group = "proposer"

    width: int | None = number(
        4, ("dynamic-tree", "drafter", "mtp"), "nodes expanded per level, and children of each"
    )
    num_nodes: int | None = number(
        16, ("dynamic-tree", "drafter", "mtp"), "nodes of the tree, including the root"
    )
    exit_layer: int | None = number(
        None, ("early-exit",), "how many target layers draft; default: half"
    )
    confidence_threshold: float | None = number(
        0.0, ("draft", "early-exit", "first-of", *SELF),
        "end a chain after a draft token with a lower probability than this",
    )  # fmt: skip
    min_share: float | None = number(
        0.0, ("datastore",), "no drafts where the most probable token has a lower probability"
    )


@dataclasses.dataclass(frozen=True)
class ProposerOptions(NumberOptions):
    """What drafts."""

    proposer: str | None = option(
        None,
        f"{', '.join(KINDS)}, or module:Name for your own; default: drafter with --drafter; "
        "auto with --rule match and no numbers of a proposer; else draft if there is one, or ngram",
        metavar="NAME",
    )
    num_drafts: int | None = number(4, WITH_DEPTH, DEPTH, names=("--num-speculative-tokens",))
    branching: tuple[int, ...] | None = number((3, 2, 1), ("tree", "datastore"), BRANCHING)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.proposer is not None and self.proposer not in KINDS and ":" not in self.proposer:
            raise ValueError(
                f"--proposer {self.proposer!r} is neither one of {', '.join(KINDS)} nor a "
                "module:Name of your own"
            )


_OF_RULES = {
    option_: (name, parameter.default)
    for name, kind in specjax.RULES.items()
    for option_, parameter in inspect.signature(kind).parameters.items()
}
"""The rule of each number of a rule, and its default: the fields of the rules' dataclasses."""

if TYPE_CHECKING:

    class RuleNumbers(Options):
        """The fields of all rules, as options."""
else:
    RuleNumbers = dataclasses.make_dataclass(
        "RuleNumbers",
        [
            (name, type(value) | None, number(value, (owner,), "", "--rule"))
            for name, (owner, value) in _OF_RULES.items()
        ],
        bases=(Options,),
        namespace={"group": "rule"},
        frozen=True,
    )


@dataclasses.dataclass(frozen=True)
class RuleOptions(RuleNumbers):
    """Which drafts are accepted."""

    group = "rule"

    rule: str = option(
        "match", "rule that accepts or rejects draft tokens", choices=sorted(specjax.RULES)
    )


_NUMBERS = {
    field.name: field.metadata
    for cls in (ProposerOptions, RuleOptions)
    for field in dataclasses.fields(cls)
    if "owners" in field.metadata
}


def given(options: Options, whose: str = "--proposer") -> dict[str, Value]:
    """Returns the numbers of proposers that were given, or with "--rule" those of rules."""
    found = {name: getattr(options, name, None) for name in _NUMBERS}
    return {
        name: value
        for name, value in found.items()
        if value not in (None, ()) and _NUMBERS[name]["whose"] == whose
    }


def number_of(numbers: Mapping[str, Value], name: str) -> Value:
    """Returns the value of a proposer's option: the given one, or its default."""
    return numbers.get(name, _NUMBERS[name]["value"])


def numbers_of(kind: str, numbers: Mapping[str, Value]) -> dict[str, Value]:
    """Returns every option that a proposer of this kind uses, with its value."""
    return {name: number_of(numbers, name) for name in _NUMBERS if reads(kind, name)}


def reads(kind: str, name: str) -> bool:
    """Returns whether a proposer of this kind uses an option."""
    return _NUMBERS[name]["whose"] == "--proposer" and kind in _NUMBERS[name]["owners"]


def check_numbers(options: Options, proposers: Sequence[str], rules: Sequence[str]) -> None:
    """Raises ValueError for an option that none of these proposers or rules uses."""
    for whose, asked in (("--proposer", proposers), ("--rule", rules)):
        for name in given(options, whose):
            owners = _NUMBERS[name]["owners"]
            if not set(owners) & set(asked):
                raise ValueError(
                    f"{flag(name)} is not used by {whose} {', '.join(asked)}; "
                    f"leave it out, or use {whose} {' or '.join(owners)}"
                )


def make_rule(options: Options, name: str) -> Rule:
    """Returns the rule of this name, with the options that were given."""
    numbers = given(options, "--rule")
    own = {key: value for key, value in numbers.items() if name in _NUMBERS[key]["owners"]}
    return specjax.RULES[name](**own)
