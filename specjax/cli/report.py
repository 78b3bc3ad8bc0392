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


class Row(Facts):
    """A row of the report; the speeds are None without an undisturbed sample."""

    alpha: Interval | None
    tau: Interval | None
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


def label(facts: Facts) -> str:
    """Returns the proposer, with the branching of its tree if it has one."""
    return f"{facts['proposer']} {','.join(map(str, facts.get('branching', [])))}".strip()


_COLUMNS = (
    "proposer", "depth", "drafts", "rule", "alpha", "tau", "tokens/s", "speed-up",
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
    by_temperature = itertools.groupby(measured["rows"], key=lambda row: row["temperature"])
    for temperature, rows in by_temperature:
        print(f"\ntemperature {temperature:g}\n\n| {' | '.join(_COLUMNS)} |")
        print("|" + "---|" * len(_COLUMNS))
        for row in rows:
            speed, speedup = row["tokens_per_second"], row["speedup"]
            ends, median = row["speedup_interval"], row["speedup_median"]
            same = "" if row["same_tokens"] is None else f"{row['same_tokens']}/{report['prompts']}"
            cells = [
                label(row), row["num_drafts"], row["drafted"],
                row["rule"] + ("" if row["exact"] else " (exact=False)"),
                show(row["alpha"], ".3f"), show(row["tau"], ".2f"),
                "" if speed is None else f"{speed:.0f}",
                show(None if speedup is None or ends is None else (speedup, *ends), ".2f"),
                "" if median is None else f"{median:.2f}",
                same, f"{row['first_call_seconds']:.1f}",
            ]  # fmt: skip
            print("| " + " | ".join(map(str, cells)) + " |")
