"""`Policy`: the constants with which an `Adaptive` proposer chooses the option of a step."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Policy:
    """The constants that estimate acceptance rates, and that limit the time of trials.

    A *step* as a unit of time is a step of plain decoding.  All numbers were set by hand: those of
    rates and trials with `python -m bench.adaptive`, which compares the choices with the best fixed
    option on 72 kinds of texts and costs.

    Attributes:
      windows: drafts.  A window of w drafts estimates the rate from about the last w drafts.  Short
        windows follow a text that changes; long ones have less variance in a text that does not.
      dealt: share.  The share of the windows' weight that is redistributed after each step, so that
        no window's weight vanishes.
      prior_share: share.  The rate of earlier texts counts as this share of the drafts that a
        window still lacks.
      common: drafts.  The rate of earlier texts counts as this many drafts when it is pooled with
        the drafts of the other rows of a batch.
      kept: factor.  Each new draft of a depth multiplies the older counts of that depth by it.
      alike: drafts.  The prior that all depths have one rate counts as this many drafts, since few
        drafts reach a great depth.
      most: probability.  The greatest acceptance rate; the least is its complement.
      least: weight.  It is added to the weight of each window, so that they do not sum to 0 after
        many unlikely outcomes.
      margin: share.  Drafts must promise this share more tokens a second than plain decoding, since
        rates and times are estimates.
      stays: steps.  The expected number of steps until the choice changes again; the time in which
        a drafter reads the tokens that it missed is divided by it.
      apart: factor.  Rows drift apart by about this number times the square root of the tokens that
        are left.  A row that is behind another one by that much has e times its weight.
      budget_share: share.  The share of the decoding time that trials may cost.
      won: share.  Trials of a proposer may also cost this share of the time that its drafts saved,
        since drafts that paid once are likelier to pay again.
      most_budget: steps.  The largest budget: a text that changes needs a few trials, and another
        text would only lose more.
      most_debt: steps.  Drafts that promise to pay may cost this much more than they saved, less
        `budget_share` of the time; then only trials draft.  So a text that is made to be rejected
        takes at most a few hundredths longer (`python -m bench.attack`).
      ahead: steps.  A proposer whose drafts do not pay goes on while its budget covers this many
        steps.
      longest_pause: steps.  The pause before a trial doubles up to it.
      pause: steps.  The pause before the first trial of a proposer without a rate from earlier
        texts.
      first_budget: steps.  The first budget of the trials of such a proposer; for a proposer with a
        rate from earlier texts, one trial is always paid.
      nearly: share.  A proposer that by its prior exceeds this share of the speed of plain decoding
        is tried after `pause` steps.

    Example:
      >>> cautious = Policy(budget_share=0.002, first_budget=1.0)
      >>> Adaptive(NGram(4), None, (1, 3, 5), cautious)
    """

    windows: tuple[float, ...] = (8.0, 32.0, 128.0, 512.0)
    dealt: float = 0.02
    prior_share: float = 0.25
    common: float = 32.0
    kept: float = 0.995
    alike: float = 32.0
    most: float = 0.99
    least: float = 1e-30
    margin: float = 0.01
    stays: float = 16.0
    apart: float = 0.5
    budget_share: float = 0.01
    won: float = 0.1
    most_budget: float = 8.0
    most_debt: float = 8.0
    ahead: int = 16
    longest_pause: int = 32
    pause: int = 2
    first_budget: float = 3.0
    nearly: float = 0.9

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            numbers = value if isinstance(value, tuple) else (value,)
            if not numbers or not all(0 < number < math.inf for number in numbers):
                raise ValueError(f"{field.name}={value!r}; pass a number above 0")

    @property
    def belief(self) -> tuple[float, ...]:
        """The weight of each window before any outcome, in proportion to its length."""
        return tuple(window / sum(self.windows) for window in self.windows)


POLICY = Policy()
"""The default policy."""
