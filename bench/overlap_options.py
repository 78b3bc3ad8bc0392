"""The options of `python -m bench.overlap`."""

from __future__ import annotations

import dataclasses

from specjax.options import fields


@dataclasses.dataclass(frozen=True)
class OverlapOptions(fields.Options):
    """The options of `python -m bench.overlap`."""

    alpha: float = fields.option(0.8, "acceptance rate")
    second: float = fields.option(
        0.5, "how often the second guess is right where the first is wrong"
    )
    num_drafts: int = fields.option(4, "draft tokens per step")
    outcomes: int = fields.option(4, "outcomes that are drafted for")
    ratios: tuple[float, ...] = fields.option(
        (0.1, 0.2, 0.4, 0.6, 0.8, 1.0),
        "the draft's time for a proposal over the target's for a pass",
    )
    verify_ms: float = fields.option(40.0, "a pass of the target")
    new_tokens: int = fields.option(160, "tokens of a text")
    rounds: int = fields.option(4, "measured turns")
    guesses: bool = fields.option(False, "hit rates of the shipped pair")
    batch: int = fields.option(26, "with --guesses: prompts")
    processes: str | None = fields.option(None, "random weights, such as 110m", metavar="SIZE")
    weights: str = fields.option("/tmp/specjax-bench", "their folder")
    json: str | None = fields.option(None, "write the cells to this file")
