"""Speed-ups that others measured on TPUs, beside the roofline of our program for the same case.

Nothing is fitted.  The measurements on TPUs do not name their tokens a step, so these are from the
authors of DSpark, who measured each drafter for Qwen3 8B, averaged over their nine benchmarks
(DeepSpec paper, table 1, temperature 1).  For the v5p the number of chips was not found either, and
one is assumed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bench.compiled.cells import Cell
from bench.compiled.chips import CHIPS
from bench.compiled.roofline import least_seconds

TOKENS = {
    "eagle3": (5.30, 4.77, 3.91, 3.96, 4.33, 4.17, 2.66, 2.54, 2.54),
    "dflash": (5.33, 4.91, 4.07, 4.36, 4.64, 4.39, 3.11, 2.98, 2.81),
    "dspark": (6.17, 5.78, 5.01, 5.16, 5.52, 5.17, 3.72, 3.58, 3.21),
}
"""Drafter -> tokens a step on GSM8K, MATH, AIME25, MBPP, HumanEval, LiveCodeBench, MT-Bench, Alpaca
and Arena-Hard."""


@dataclasses.dataclass(frozen=True)
class Published:
    """A speed-up over plain decoding in the same engine."""

    drafter: str
    size: str
    chip: str
    chips: int  # as JAX counts them
    batch: int
    speed_up: float
    source: str


PUBLISHED = (
    Published("dflash", "8b", "v5p", 1, 1, 3.13, "Google developers blog, May 2026"),
    Published("eagle3", "8b", "v5p", 1, 1, 1.30, "the same, served"),
    *(
        Published("dspark", "qwen3-8b", "v7x", 8, batch, speed_up, "sglang-jax, pull request 1632")
        for batch, speed_up in ((1, 5.03), (16, 4.32), (128, 3.18))
    ),
)


def compare(cells: Sequence[Cell]) -> str | None:
    """A table of the published cases that were compiled with drafts and without; None for none."""
    by_case = {
        tuple(cell[name] for name in ("drafter", "size", "chip", "chips", "batch")): cell
        for cell in cells
        if cell["dtype"] == "bfloat16"
    }
    lines = [
        "| drafter | target | chip | batch | tokens/step | step over plain step | predicted | "
        "published | off by | source |",
        "|" + "---|" * 10,
    ]
    for case in PUBLISHED:
        about = (case.size, case.chip, case.chips, case.batch)
        drafted, plain = (by_case.get((name, *about)) for name in (case.drafter, "none"))
        if drafted is None or plain is None:
            continue
        chip = CHIPS[case.chip]
        longer = least_seconds(drafted, chip) / least_seconds(plain, chip)
        tokens = sum(TOKENS[case.drafter]) / len(TOKENS[case.drafter])
        off = tokens / longer / case.speed_up - 1
        lines.append(
            f"| {case.drafter} | {case.size} | {case.chips} x {case.chip} | {case.batch} | "
            f"{tokens:.2f} | {longer:.2f} | {tokens / longer:.2f} | {case.speed_up:.2f} | "
            f"{off:+.0%} | {case.source} |"
        )
    return "\n".join(lines) if len(lines) > 2 else None
