"""`Policy`: the numbers with which an `Adaptive` proposer chooses what a step does."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Policy:
    """What is believed about acceptance, and what may be spent to learn more of it.

    A *step* as a unit of time is a step of plain decoding.  All numbers were set by hand: those of
    rates and trials with `python -m bench.adaptive`, which compares the choices with the best fixed
    option on 72 kinds of texts and costs.

    Attributes:
      windows: drafts.  About so many of the last ones count in a rate.  The short windows follow a
        text that changes, and the long ones say for sure what pays in a text that does not.
      dealt: share.  So much of the weight of the windows is dealt out anew after each step, so that
        no window is lost for good.
      prior_share: share of a window.  The rate of earlier texts counts as so many drafts.
      common: drafts.  The rate of earlier texts counts as so many beside the drafts of all rows of
        a batch.
      kept: factor.  The weight of older drafts in what tells the depths apart.
      alike: drafts.  "All depths have one rate" counts as so many, since few drafts reach a great
        depth.
      most: probability.  No draft is surer than this, and none has less than its complement.
      least: weight.  It is added to that of each window, so that they do not add up to 0 after many
        surprising outcomes.
      margin: share.  Drafts have to promise so much more than plain decoding, since rates and times
        are estimates.
      stays: steps.  A change of the choice is expected to last so long, and what a drafter has not
        read is paid in that time.
      apart: By chance, rows drift apart by about this number times the square root of the tokens
        that are left.  A row that is so much behind another one counts e times as much.
      budget_share: share of the decoding time that trials may cost.
      won: share.  Trials of a proposer may also cost so much of the time that its drafts saved,
        since drafts that paid once are likelier to pay again.
      most_budget: steps.  The largest budget: a text that changes needs a few trials, and another
        text would only lose more.
      ahead: steps.  A proposer whose drafts do not pay goes on while its budget covers so many.
      longest_pause: steps.  The pause before a trial doubles up to it.
      pause: steps before the first trial of a part of which nothing is known.
      first_budget: steps.  What trials of such a part may cost at first; of a part that is known
        from earlier texts, one trial is paid whatever it brings.
      nearly: share.  A part that by its prior has so much of the speed of plain decoding is tried
        soon.

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
        """The weight of each window before it predicted anything: most texts stay as they are."""
        return tuple(window / sum(self.windows) for window in self.windows)


POLICY = Policy()
"""The policy by default."""
