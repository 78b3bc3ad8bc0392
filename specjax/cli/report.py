"""The report of `specjax bench`: its rows, and the code that prints them."""

from __future__ import annotations

import itertools
from typing import NotRequired, TypedDict

from specjax.measure import Interval, show


class Facts(TypedDict):
    """The settings with which a row of the report was measured."""

    proposer: str
    num_drafts: int  # greatest depth of a draft token
    drafted: int  # draft tokens a step, on all branches of a tree
    branching: NotRequired[list[int]]
    rule: str
    exact: bool
    temperature: float
    thinking: NotRequired[str]  # "on" or "off", of the chat template


class Row(Facts):
    """A row of the report; the speeds are None without an undisturbed sample."""

    alpha: Interval | None
    tau: Interval | None
    prompts: int
    acceptance_length: Interval | None  # 1 + accepted drafts / passes with drafts
    category: NotRequired[str]  # of a dataset
    accuracy: NotRequired[Interval | None]  # share of right answers
    tokens_per_second: float | None
    tokens_per_second_interval: tuple[float, float] | None
    speedup: float | None
    speedup_interval: tuple[float, float] | None
    speedup_median: float | None  # of the prompts, each with its own speed-up
    first_call_seconds: float
    same_tokens: int | None  # prompts with the tokens of plain decoding; None if not comparable


class Measured(TypedDict):
    samples: int
    dropped: int
    rows: list[Row]
    categories: list[Row]  # of a dataset: the same for each category


def label(facts: Facts) -> str:
    """Returns the proposer, with the branching of its tree if it has one."""
    return f"{facts['proposer']} {','.join(map(str, facts.get('branching', [])))}".strip()


_COLUMNS = (
    "proposer", "depth", "drafts", "rule", "AL", "alpha", "tau", "tokens/s", "speed-up",
    "median", "same tokens", "first call, s",
)  # fmt: skip


def print_report(
    report: dict[str, object], impossible: list[tuple[str, str]], measured: Measured
) -> None:
    print(
        "{prompts} prompts, {max_new_tokens} new tokens each, batch 1, {dtype}; {device}, "
        "{cores} cores, jax {jax}; ".format(**report)
        + f"{measured['dropped']} samples dropped; 95 % intervals and median speed-up over prompts"
    )
    for proposer, rule in impossible:
        print(f"not possible: {proposer} with {rule}, which supports chains only")
    if synthetic := report.get("synthetic_acceptance"):
        print(f"{synthetic} accepts drafts, right or wrong: texts are worthless, exact=False")
    for kind, rows in itertools.groupby(measured["rows"], key=_kind):
        listed = list(rows)
        scored = "accuracy" in listed[0]
        columns = (*_COLUMNS, *["accuracy"] * scored)
        print(f"\n{kind}\n\n| {' | '.join(columns)} |")
        print("|" + "---|" * len(columns))
        for row in listed:
            speed, speedup = row["tokens_per_second"], row["speedup"]
            ends, median = row["speedup_interval"], row["speedup_median"]
            same = "" if row["same_tokens"] is None else f"{row['same_tokens']}/{report['prompts']}"
            cells = [
                label(row), row["num_drafts"], row["drafted"],
                row["rule"] + ("" if row["exact"] else " (exact=False)"),
                show(row["acceptance_length"], ".2f"), show(row["alpha"], ".3f"),
                show(row["tau"], ".2f"),
                "" if speed is None else f"{speed:.0f}",
                show(None if speedup is None or ends is None else (speedup, *ends), ".2f"),
                "" if median is None else f"{median:.2f}",
                same, f"{row['first_call_seconds']:.1f}",
                *[show(row.get("accuracy"), ".3f")] * scored,
            ]  # fmt: skip
            print("| " + " | ".join(map(str, cells)) + " |")


def _kind(row: Row) -> str:
    """Returns the heading of a table."""
    thinking = f", thinking {row['thinking']}" if "thinking" in row else ""
    return f"temperature {row['temperature']:g}{thinking}"


def print_categories(measured: Measured) -> None:
    """Prints, for each proposer of a dataset, a row for each category."""
    rows = [row for row in measured["categories"] if row["drafted"]]
    for kind, some in itertools.groupby(rows, key=_kind):
        for (name, rule), each in itertools.groupby(some, key=lambda r: (_long(r), r["rule"])):
            listed = list(each)
            scored = "accuracy" in listed[0]
            columns = ("category", "questions", "AL", "alpha", "speed-up", "same tokens")
            columns = (*columns, *["accuracy"] * scored)
            print(f"\n{kind}: {name} with {rule}\n\n| {' | '.join(columns)} |")
            print("|" + "---|" * len(columns))
            for row in listed:
                ends, speedup = row["speedup_interval"], row["speedup"]
                same = row["same_tokens"]
                cells = [
                    row.get("category"), row["prompts"], show(row["acceptance_length"], ".2f"),
                    show(row["alpha"], ".3f"),
                    show(None if speedup is None or ends is None else (speedup, *ends), ".2f"),
                    "" if same is None else f"{same}/{row['prompts']}",
                    *[show(row.get("accuracy"), ".3f")] * scored,
                ]  # fmt: skip
                print("| " + " | ".join(map(str, cells)) + " |")


def _long(row: Row) -> str:
    return f"{label(row)}, {row['num_drafts']} drafts"
