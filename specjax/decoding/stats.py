"""Figures of speculation: acceptance rate, mean accepted length, and the speed-up they predict.

acceptance_rate (alpha)      accepted drafts / judged drafts.  On a chain the drafts up to the first
                             rejection are judged; later ones are not counted.  This is the alpha
                             of the literature's formulas.  vLLM's "draft acceptance rate" divides
                             by all proposed drafts, and is lower.
mean_accepted_length (tau)   new tokens / target passes, so plain decoding has 1; also called
                             tokens_per_pass.
acceptance_length (AL)       1 + accepted drafts / passes with drafts, the figure of vLLM, SGLang
                             and SPEED-Bench.  It leaves out passes in which nothing was drafted,
                             so for a proposer that abstains it is above tau.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from specjax.types import Json, Stats


@dataclasses.dataclass(frozen=True)
class Summary:
    """The figures of a call, over all its rows."""

    acceptance_rate: float | None  # None if no draft was judged
    mean_accepted_length: float
    target_passes: int
    tokens: int  # new ones, without those after a stop string
    accepted: int  # accepted drafts
    tested: int  # judged drafts
    seconds: float  # of prefill and decoding
    compile_seconds: float = 0.0  # of compilation before that; 0 if an earlier call compiled
    # With a mesh for the draft: the share of proposals that were ready when the target needed them,
    # and the share that was expected; else None.
    hit_rate: float | None = None
    expected_hit_rate: float | None = None
    proposed: int = 0  # drafts, whether judged or not
    drafting: int = 0  # target passes with at least one draft

    @property
    def tokens_per_second(self) -> float:
        """New tokens / seconds, without compilation."""
        return self.tokens / self.seconds

    @property
    def tokens_per_pass(self) -> float:
        """Another name for `mean_accepted_length`."""
        return self.mean_accepted_length

    @property
    def acceptance_length(self) -> float | None:
        """Returns 1 + accepted / drafting, as SPEED-Bench has it; None without drafts."""
        return 1 + self.accepted / self.drafting if self.drafting else None

    def __str__(self) -> str:
        alpha = "no drafts" if self.acceptance_rate is None else f"alpha {self.acceptance_rate:.3f}"
        compiled = f", compiled in {self.compile_seconds:.1f} s" if self.compile_seconds else ""
        hits = "" if self.hit_rate is None else f", hits {self.hit_rate:.3f}"
        return (
            f"{self.tokens} tokens in {self.target_passes} passes, "
            f"{self.tokens_per_second:.1f} tokens/s, {alpha}, "
            f"tau {self.mean_accepted_length:.2f}{hits}{compiled}"
        )

    def to_json(self) -> dict[str, Json]:
        """Returns the figures by name, with `tokens_per_second`."""
        return {**dataclasses.asdict(self), "tokens_per_second": self.tokens_per_second}


def acceptance_rate(stats: Stats) -> float | None:
    """Returns accepted / judged drafts, over all rows; None if no draft was judged."""
    tested = int(np.sum(stats.tested))
    return int(np.sum(stats.accepted)) / tested if tested else None


def mean_accepted_length(stats: Stats) -> float:
    """Returns the new tokens per target pass, over all rows; 0 if there was no pass."""
    passes = int(np.sum(stats.target_passes))
    return int(np.sum(stats.emitted)) / passes if passes else 0.0


def summarize(stats: Stats, tokens: int, seconds: float, compile_seconds: float = 0.0) -> Summary:
    """Returns the figures of a call that returned `tokens` new tokens."""
    return Summary(
        acceptance_rate=acceptance_rate(stats),
        mean_accepted_length=mean_accepted_length(stats),
        target_passes=int(np.sum(stats.target_passes)),
        tokens=tokens,
        accepted=int(np.sum(stats.accepted)),
        tested=int(np.sum(stats.tested)),
        seconds=seconds,
        compile_seconds=compile_seconds,
        proposed=int(np.sum(stats.proposed)),
        drafting=int(np.sum(stats.drafting)),
    )


def expected_accepted_length(alpha: float, num_drafts: int) -> float:
    """Returns the expected number of tokens per target pass with gamma = `num_drafts`.

    It is (1 - alpha^(gamma+1)) / (1 - alpha) if acceptances are independent (Leviathan et al. 2022,
    arXiv 2211.17192, equation 1).
    """
    return sum(alpha**k for k in range(num_drafts + 1))


def expected_speedup(alpha: float, num_drafts: int, draft_cost: float) -> float:
    """Returns the speed-up over plain decoding, if a verifying pass costs no more than a plain one.

    Source: Leviathan et al. 2022, arXiv 2211.17192, theorem 3.8.

    Args:
      alpha: acceptance rate.
      num_drafts: gamma.
      draft_cost: c, the time of a draft pass over the time of a target pass.
    """
    return expected_accepted_length(alpha, num_drafts) / (num_drafts * draft_cost + 1)
